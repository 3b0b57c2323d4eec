"""Dtypes by their names in a config, and the dtype for accumulation."""

from __future__ import annotations

import torch

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def wider(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for accumulation: at least float32, and float64 for float64."""
    return torch.promote_types(dtype, torch.float32)
