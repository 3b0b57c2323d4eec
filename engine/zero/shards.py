"""How parameters are made and written that under ZeRO-3 lie on all ranks, a share on each.

They are parted as soon as they are made, so that a model of 70B is never whole on a rank, and gathered one by one to be
drawn or loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import deepspeed
import torch
from deepspeed import ops
from torch import nn

from engine.config.schema import Config
from engine.zero.settings import deepspeed_settings


def join() -> None:
    """Let DeepSpeed take the default group of `torch.distributed`, which is initialised, as ZeRO's."""
    if not torch.cuda.is_available():
        ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for 35 s and serves inference only
    deepspeed.init_distributed(auto_mpi_discovery=False)


def sharded(config: Config) -> AbstractContextManager[object]:
    """Return where a model is made so that, under ZeRO-3, each rank keeps its share of each parameter alone."""
    if config.zero.stage < 3:
        return nullcontext()
    join()
    # It takes the dtype from the settings. Named apart, a CPU without half precision would make bf16 of float32.
    init: AbstractContextManager[object] = deepspeed.zero.Init(config_dict_or_path=deepspeed_settings(config))
    return init


@contextmanager
def whole(parameter: nn.Parameter) -> Iterator[bool]:
    """Gather a parameter that is to be written, on all ranks at once, and say whether this one writes it.

    One that lies whole on every rank is written by all.
    """
    if not hasattr(parameter, "ds_id"):
        yield True
        return
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        yield torch.distributed.get_rank() == 0
