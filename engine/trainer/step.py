"""One step on one rank: the micro-batches that the plan gives it, in the plan's order, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from engine.attention.comm import RingComm
from engine.attention.kernels.call import Kernel
from engine.attention.layout import idle, layout
from engine.attention.meeting import Meeting
from engine.data.slices import Slices
from engine.memory.offload import Offload
from engine.planner.plan import MicroBatch, StepPlan

Forward = Callable[[Tensor, Tensor, Meeting, Tensor], Tensor]  # tokens, positions, meeting, labels -> summed loss
Slicer = Callable[[MicroBatch], Slices]


@dataclass(frozen=True)
class RankContext:
    """What every micro-batch of a rank needs: where it runs, how it talks to its rings, which kernel attends, and where
    activations wait that the plan sends to the host; None where no plan does."""

    rank: int
    device: torch.device
    comm: RingComm
    kernel: Kernel
    offload: Offload | None = None


@dataclass
class StepTimes:
    """What a step took on this rank: seconds of reading, and the spans (micro-batch, start, stop) from its start."""

    data_wait_s: float = 0.0
    spans: list[tuple[int, float, float]] = field(default_factory=list)


def micro_batch_loss(forward: Forward, micro: MicroBatch, slices: Slices, context: RankContext) -> Tensor:
    """Return the summed loss of a rank's part of a micro-batch; an idle one gives a connected zero."""
    shards = layout(micro) if micro.shards else idle(len(slices.tokens))
    meeting = Meeting(shards, context.comm, context.kernel)
    tokens, labels, positions = (
        torch.from_numpy(part).to(context.device) for part in (slices.tokens, slices.labels, slices.positions)
    )
    return forward(tokens, positions, meeting, labels)


def run_step(
    plan: StepPlan, forward: Forward, backward: Callable[[Tensor], None], slicer: Slicer, context: RankContext
) -> tuple[float, StepTimes]:
    """Run forward and backward of this rank's micro-batches; return its summed loss and what it took."""
    loss_sum, times, began = 0.0, StepTimes(), time.perf_counter()
    for micro in plan.of_rank(context.rank):
        start = time.perf_counter()
        slices = slicer(micro)
        times.data_wait_s += time.perf_counter() - start
        if context.offload is not None:
            context.offload.begin(micro.offload, len(slices.tokens))
        loss = micro_batch_loss(forward, micro, slices, context)
        backward(loss)
        loss_sum += loss.item()
        times.spans.append((micro.index, start - began, time.perf_counter() - began))
    return loss_sum, times


@torch.no_grad()
def evaluate(plan: StepPlan, model: nn.Module, slicer: Slicer, context: RankContext) -> float:
    """Return this rank's summed cross-entropy of a forward-only plan.

    Idle micro-batches add nothing, and run all the same: under ZeRO-3 ranks meet in every slot.
    """
    model.eval()
    micros = plan.of_rank(context.rank)
    loss_sum = sum(micro_batch_loss(model, micro, slicer(micro), context).item() for micro in micros)
    model.train()
    return loss_sum
