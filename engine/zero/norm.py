"""The norm of the gradient in an update of stage 3: DeepSpeed computes it on the device; it is copied to the host once.

DeepSpeed tests whether the norm is finite and compares it with the clip norm. Where the norm is on the device, each of
these waits for the device. On the host they cost nothing.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from deepspeed.runtime.zero import stage3
from torch import Tensor


def _on_host(*arguments: Any, **options: Any) -> Tensor:
    """DeepSpeed's function, whose result is a scalar, copied to the host."""
    norm: Tensor = _norm(*arguments, **options)
    return norm.cpu()


# DeepSpeed has no option for it.
_norm = stage3.combine_grad_norm_groups
stage3.combine_grad_norm_groups = wraps(_norm)(_on_host)
