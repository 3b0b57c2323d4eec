"""Dtypes: by the names that a config has, and the one in which sums are kept."""

from __future__ import annotations

import torch

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def wider(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums are kept: at least float32, and float64 stays float64."""
    return torch.promote_types(dtype, torch.float32)
