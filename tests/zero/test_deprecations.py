"""Tests take warnings for errors, except those of DeepSpeed about collectives that PyTorch 2.14 has renamed."""

from __future__ import annotations

import warnings

import pytest


@pytest.mark.parametrize("name", ["all_gather_into_tensor", "reduce_scatter_tensor"])
def test_deepspeed_may_call_collectives_by_their_old_names(name: str) -> None:
    message = f"`torch.distributed.{name}` is deprecated. Please use another instead."

    def warn(message: str, module: str) -> None:
        warnings.warn_explicit(message, FutureWarning, "torch.py", 1, module=module)

    warn(message, "deepspeed.comm.torch")
    with pytest.raises(FutureWarning):
        warn(message, "engine.zero.sharded")
    with pytest.raises(FutureWarning):
        warn("`torch.distributed.gather_into_tensor` is deprecated.", "deepspeed.comm.torch")
