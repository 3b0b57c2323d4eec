"""Tells DeepSpeed which parameters are those of experts, and which ranks store the same ones.

DeepSpeed recognises a mixture of experts by modules of its class `MoE`, its parameters by two marks, and their groups
of ranks in tables by name. Gradients of experts are then summed over the ranks that store the same experts, and their
states are sharded over these ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups
from torch import nn

from engine.models.experts.layer import expert_weights
from engine.parallel.axes import Axes

_NAME = "experts"  # of the groups of ranks
EXPERT_GROUP: dict[str, Any] = {"moe": True, "name": _NAME}  # keys of the optimizer's group of experts


class _Sign(MoE):
    """Shows DeepSpeed that a model has experts. It has no parameters and is never called."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.num_experts = 0

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Create no groups: `experts_known` sets them."""


@contextmanager
def experts_known(model: nn.Module, axes: Axes | None) -> Iterator[None]:
    """Return a context in which to initialise DeepSpeed with a model whose experts an ep group may share."""
    for table, group in (
        (groups._EXPERT_PARALLEL_GROUP, axes and axes.ep),
        (groups._EXPERT_DATA_PARALLEL_GROUP, axes and axes.experts),
    ):
        table.clear()  # DeepSpeed keeps those of the engine before
        if group is not None:
            table[_NAME] = group
    if axes is None or axes.experts is None:
        yield
        return
    groups._EXPERT_DATA_PARALLEL_GROUP_RANKS[_NAME] = dist.get_process_group_ranks(axes.experts)
    for parameter in expert_weights(model):
        parameter.allreduce, parameter.group_name = False, _NAME  # type: ignore[attr-defined]
    model.add_module("sign", _Sign())
    yield
    del model.sign
