"""Checks whether a bf16 result was rounded only once."""

from __future__ import annotations

import torch
from torch import Tensor


def nearly_all_rounded_once(found: Tensor, exact: Tensor) -> bool:
    """Whether bf16 values are the exact ones rounded; float32 inside may tip the scales once in a thousand."""
    assert found.dtype == torch.bfloat16
    return bool((found == exact.bfloat16()).double().mean() > 0.995)
