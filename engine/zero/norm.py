"""The norm of the gradient in an update: DeepSpeed computes it on the device, and it is copied to the host once.

DeepSpeed tests whether the norm is finite and compares it with the clip norm. Where the norm is on the device, each of
these waits for the device. On the host they cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.zero import stage3, stage_1_and_2
from torch import Tensor


def _on_host(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(norm)
    def copied(*arguments: Any, **options: Any) -> Tensor:
        return norm(*arguments, **options).cpu()

    return copied


# DeepSpeed has no option for it. Each of its optimizers computes the norm of a step by one of these functions.
for module, name in (
    (bf16_optimizer, "get_global_norm_of_tensors"),
    (stage_1_and_2, "combine_grad_norm_groups"),
    (stage3, "combine_grad_norm_groups"),
):
    setattr(module, name, _on_host(getattr(module, name)))


def find_overflow_by_norm(optimizer: Any) -> None:
    """Keep DeepSpeed's `optimizer` from testing gradients for values that are not finite before it computes the norm.

    Such values make the norm infinite, and the optimizer then skips the update as well.
    """
    if isinstance(optimizer, stage_1_and_2.DeepSpeedZeroOptimizer):
        optimizer.has_overflow = lambda partition_gradients=True: False
