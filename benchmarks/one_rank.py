"""One rank alone, made as the trainer makes it: what benchmarks run micro-batches and steps of one sequence on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch.distributed as dist

from benchmarks import on_gpu
from engine.attention.comm import RingComm
from engine.attention.kernels.choice import choose
from engine.config.schema import Config
from engine.cost.model import PPM, Costs
from engine.dtypes import DTYPES
from engine.hardware.measured import Case
from engine.hardware.micro_batches import micro_batch, random_slices
from engine.launch.commands import free_port
from engine.memory.offload import Offload
from engine.planner.estimate import estimate
from engine.planner.memory import Load
from engine.planner.settings import PlanSettings
from engine.trainer.groups import Groups, join_groups
from engine.trainer.model import make_model, make_offload
from engine.trainer.optimizer import build_optimizer
from engine.trainer.step import RankContext, micro_batch_loss
from engine.zero.engine import ZeroEngine

_RATE = 1e-6  # of updates: nobody looks at what is learnt
_SHORT = 8192  # tokens of a sequence that lets all be compiled


@contextmanager
def joined() -> Iterator[Groups]:
    """Join a world of this process alone, and leave it at the end."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(place, MASTER_PORT=str(free_port()))
    groups = join_groups()
    try:
        yield groups
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class OneRank:
    """A model with its optimizer on this process; activations may wait in the host memory that the config names."""

    config: Config
    engine: ZeroEngine
    context: RankContext
    offload: Offload

    @classmethod
    def of(cls, config: Config, groups: Groups) -> OneRank:
        """Make one."""
        device = groups.device
        kernel = choose(device, DTYPES[config.dtype], config.model.head_dim)
        model = make_model(config, device)
        room = config.cluster.host_memory - Costs.of(config).host_fixed_bytes
        model.offload = offload = make_offload(config, device, room)
        engine = ZeroEngine(model, build_optimizer(model, config.optimizer), config)
        return cls(config, engine, RankContext(0, device, RingComm(groups.rings), kernel, offload), offload)

    def micro_batch(self, tokens: int, ratio: float = 0.0, look: Callable[[], int] = int) -> tuple[int, int]:
        """Run a sequence forward and backward, `ratio` of what its layers save on the host meanwhile.

        Returns what `look` gives after each pass. The device may still be computing the first then.
        """
        micro = replace(micro_batch(Case(self.config.model.layers, (tokens,)), 0, 1), offload=ratio)
        slices = random_slices(micro, self.config.model.vocab)
        self.offload.begin(micro.offload, tokens)
        loss = micro_batch_loss(self.engine.forward, micro, slices, self.context)
        forward = look()
        self.engine.backward(loss, tokens)
        loss.item()
        return forward, look()

    def warm_up(self, tokens: int, ratio: float) -> None:
        """Take the host's memory for such a sequence, and let all be compiled and the optimizer's moments be there."""
        self.offload.make_room(ratio, tokens)
        for share in {0.0, ratio}:
            self.micro_batch(min(_SHORT, tokens), share)
        self.engine.step(_RATE)

    def step(self, tokens: int, ratio: float) -> dict[str, int]:
        """Run a whole step of one sequence; return the most that was held in each of its parts."""
        look = partial(on_gpu.new_peak, self.context.device)
        look()
        forward, backward = self.micro_batch(tokens, ratio, look)
        self.engine.step(_RATE)
        return {"forward pass": forward, "backward pass": backward, "update": look()}

    def estimated(self, tokens: int, ratio: float) -> int:
        """Return the bytes of tensors that the estimate has for a step: no context, no gaps."""
        load = Load(tokens, tokens, round(PPM * ratio))
        found = estimate(self.config, PlanSettings.of(self.config), load)
        return found.peak - found.items["other"]
