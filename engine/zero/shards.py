"""Parameters under ZeRO-3, where each rank stores a shard of every parameter.

Parameters are sharded as soon as they are created, so no rank ever stores a whole 70B model. Each rank initialises its
own shards. To load weights, parameters are gathered one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import ops
from deepspeed.runtime import compiler
from deepspeed.utils import groups
from torch import nn

from engine.config.schema import Config
from engine.models.common.initialise import Stored, whole
from engine.parallel.axes import Axes
from engine.zero.settings import deepspeed_settings


def init_deepspeed() -> None:
    """Initialise DeepSpeed with the default group of `torch.distributed`, which must already be initialised."""
    if not torch.cuda.is_available():
        ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it takes 35 s, and only inference uses it
    _import_muon()
    deepspeed.init_distributed(auto_mpi_discovery=False)
    # DeepSpeed would make another group of all ranks, because older versions of PyTorch had no numbers of ranks in the
    # default group. On GPUs that would be one more communicator.
    groups._WORLD_GROUP = dist.group.WORLD


def _import_muon() -> None:
    """Import DeepSpeed's Muon without compiling it.

    DeepSpeed imports it to see that an optimizer is another one. To compile it, PyTorch would import Inductor, which
    takes as long as all other imports of a rank together.
    """
    compiled = compiler.compile
    compiler.compile = lambda: compiler.dummy_decorator
    try:
        import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        compiler.compile = compiled


def sharded(config: Config, axes: Axes | None = None) -> AbstractContextManager[object]:
    """Return a context in which to create a model, so that under ZeRO-3 each rank stores only its shards of parameters.

    `axes` are the groups of this rank; None if every rank has the whole model. In stages 1 and 2 the context does
    nothing.
    """
    if config.zero.stage < 3:
        return nullcontext()
    init_deepspeed()
    # The dtype is part of the settings. As an argument, bf16 would become float32 on CPUs without half precision.
    init: AbstractContextManager[object] = deepspeed.zero.Init(
        data_parallel_group=axes.hdp if axes else None, config_dict_or_path=deepspeed_settings(config)
    )
    return init


def stored(parameter: nn.Parameter) -> Stored:
    """The elements of a parameter that this rank stores, without the padding at the end of the last shard."""
    if not hasattr(parameter, "ds_id"):
        return whole(parameter)
    shard, shape = parameter.ds_tensor, torch.Size(parameter.ds_shape)  # type: ignore[attr-defined]
    start = len(shard) * dist.get_rank(parameter.ds_process_group)  # type: ignore[attr-defined]
    return Stored(shard[: max(0, shape.numel() - start)], start, shape)


@contextmanager
def gathered(parameter: nn.Parameter) -> Iterator[bool]:
    """Gather a sharded parameter so that weights can be loaded into it. All ranks must enter the context.

    Yields whether this rank must write the parameter. DeepSpeed distributes the written values. If the parameter is not
    sharded, every rank must write it.
    """
    if not hasattr(parameter, "ds_id"):
        yield True
        return
    group = parameter.ds_process_group  # type: ignore[attr-defined]
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        yield dist.get_rank(group) == 0
