"""The whole states of an engine by parameter, from the shards of all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.zero.engine import ZeroEngine
from engine.zero.sharded import ShardedOptimizer


def masters(engine: ZeroEngine) -> dict[str, Tensor]:
    """The master weights."""
    return {name: states["master"] for name, states in full_states(engine, only_masters=True).items()}


@torch.no_grad()
def full_states(engine: ZeroEngine, only_masters: bool = False) -> dict[str, dict[str, Tensor]]:
    """The master weight and the optimizer's states of each parameter. All ranks must call it."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    inner: Any = engine._engine.optimizer
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    found: dict[str, dict[str, Tensor]] = {name: {} for name in names.values()}
    if not isinstance(inner, ShardedOptimizer):
        keys = {key for state in inner.optimizer.state.values() for key in state} - {"step"}
        for parameter, name in names.items():
            found[name]["master"] = safe_get_full_fp32_param(parameter).clone()
            for key in set() if only_masters else keys:
                found[name][key] = safe_get_full_optimizer_state(parameter, key).clone()
        return found
    for bucket in inner.buckets:
        states = {"master": bucket.master.detach(), **inner.optimizer.state[bucket.master]}
        for key, shard in states.items():
            if key == "step":
                continue
            flat = torch.empty(bucket.ranks, len(shard), dtype=shard.dtype)
            dist.all_gather([*flat], shard.contiguous(), group=bucket.group)
            for parameter, start in zip(bucket.parameters, bucket.starts, strict=True):
                part = flat.view(-1)[start : start + parameter.numel()]
                found[names[parameter]][key] = part.view(parameter.shape).clone()
    return found
