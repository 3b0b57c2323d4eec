"""A single rank, built as in the trainer, on which benchmarks run micro-batches and steps of one sequence."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch.distributed as dist

from benchmarks.gpu import on_gpu
from engine.attention.kernels.call import Kernel
from engine.config.schema import Config
from engine.control.control import Control
from engine.fit.estimate import estimate
from engine.hardware.measured import Case
from engine.hardware.micro_batches import micro_batch, random_inputs
from engine.job import Job
from engine.offload.offload import Offload
from engine.parallel.groups import Groups, join_groups
from engine.planner.plan.step_plan import MicroBatch
from engine.planner.ratios import Load
from engine.trainer.model import build, kernel_of
from engine.trainer.step import RankContext, micro_batch_output, to_device
from engine.units import PPM
from engine.zero.engine import ZeroEngine

_LEARNING_RATE = 1e-6  # any value: the trained weights are not used
_SHORT = 8192  # tokens; long enough for everything to be compiled


@contextmanager
def joined(config: Config) -> Iterator[Groups]:
    """Create a world of this process only, as a context manager; yields its process groups."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    groups = join_groups(config, Control(0))
    try:
        yield groups
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class OneRank:
    """A model and its optimizer in this process, with activation offload up to the config's host memory."""

    config: Config
    engine: ZeroEngine
    context: RankContext
    offload: Offload

    @classmethod
    def of(cls, config: Config, groups: Groups) -> OneRank:
        """Build the model and its optimizer. The config must not turn offload off."""
        _, engine, context = build(Job(config), groups)
        assert context.offload is not None
        return cls(config, engine, context, context.offload)

    def with_kernel(self, kernel: Kernel) -> OneRank:
        """Return the same rank with another attention kernel."""
        return replace(self, context=replace(self.context, kernel=kernel))

    def with_plans(self) -> OneRank:
        """Return the same rank, with cuDNN (if that is its kernel) from a shape's first call on.

        In training a shape gets cuDNN's execution plan only when it has come often enough, so a benchmark that repeats
        one shape would change the kernel in the middle of the measurement.
        """
        return self.with_kernel(kernel_of(self.config, self.context.device, ranks=1, plan_build_s=0.0))

    def micro_batch(self, tokens: int, ratio: float = 0.0, look: Callable[[], int] = int) -> tuple[int, int]:
        """Run a random sequence forward and backward with `ratio` of its saved activations offloaded.

        `look` is called after each pass; returns both results. At the first call the device may still be computing.
        """
        micro = micro_batch(Case(self.config.model.layers, (tokens,)), 0, 1)
        return self.planned(replace(micro, offload=ratio), look)

    def planned(self, micro: MicroBatch, look: Callable[[], int] = int) -> tuple[int, int]:
        """Run a micro-batch of a plan for one rank, as `micro_batch` does."""
        inputs = random_inputs(micro, self.config.model.vocab)
        tokens = len(inputs.tokens)
        self.offload.begin(micro.offload, tokens)
        loss = micro_batch_output(self.engine.forward, micro, to_device(inputs, self.context.device), self.context)
        forward = look()
        self.engine.backward(loss, tokens)
        loss.item()
        return forward, look()

    def warm_up(self, tokens: int, ratio: float) -> None:
        """Allocate host memory for such a micro-batch, compile all kernels, and create the optimizer states."""
        self.offload.make_room(ratio, tokens)
        for offloaded in {0.0, ratio}:
            self.micro_batch(min(_SHORT, tokens), offloaded)
        self.engine.step(_LEARNING_RATE)

    def step(self, tokens: int, ratio: float) -> dict[str, int]:
        """Run a step of one sequence; return the peak bytes in its forward pass, backward pass and update."""
        look = partial(on_gpu.new_peak, self.context.device)
        look()
        forward, backward = self.micro_batch(tokens, ratio, look)
        self.engine.step(_LEARNING_RATE)
        return {"forward pass": forward, "backward pass": backward, "update": look()}

    def estimated(self, tokens: int, ratio: float) -> int:
        """Estimate the peak bytes of tensors in a step of one micro-batch, without CUDA context and fragmentation."""
        load = Load(tokens, tokens, round(PPM * ratio))
        found = estimate(Job(self.config), load)
        return found.peak - found.items["other"]
