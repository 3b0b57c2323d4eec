"""One training step on one rank: runs its micro-batches, forward and backward, in the order of the plan.

Note: [host synchronisation]. Nothing here waits for the device during a step: inputs are copied ahead on a separate
stream, losses are added on the device, and times are device events. The caller reads losses and times after the update.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.attention.comm import RingComm
from engine.attention.context import AttentionContext
from engine.attention.kernels.call import Kernel
from engine.attention.layout import idle, layout
from engine.attention.prefix import Prefixes
from engine.control import progress
from engine.cost.times import rounds_per_call
from engine.data.inputs import RankInputs, idle_inputs
from engine.models.common.part import Between
from engine.offload.offload import Offload
from engine.parallel.pipeline import Pipeline, with_gradient
from engine.planner.plan.order import Action, Pass, actions
from engine.planner.plan.step_plan import MicroBatch, RankPlan

# (tokens, positions, labels, attention) -> summed loss; in a pipeline, a stage has the residual stream of the stage
# before it in place of tokens, and returns `Between` in place of the loss
Forward = Callable[[Tensor, Tensor, Tensor, AttentionContext], Any]
ReadInputs = Callable[[MicroBatch], RankInputs]
Mark = torch.cuda.Event | float  # a point in time: a CUDA event, or seconds on a CPU
_LEAVING = 2  # residual streams that a stage may be sending at once in validation


@dataclass(frozen=True)
class RankContext:
    """What every micro-batch of a rank needs besides the model. The objects are the same for the whole run.

    `prefixes` and `offload` have state: `run_step` clears `prefixes` when a step begins. `offload` is None if
    activations are never offloaded, `pipeline` if the device has all layers.
    """

    hdp_rank: int
    device: torch.device
    comm: RingComm
    kernel: Kernel
    offload: Offload | None = None
    pipeline: Pipeline | None = None
    prefixes: Prefixes = field(default_factory=Prefixes)
    # begins to reduce gradients within the next backward pass; None if a reduction would block it
    reduce_from_here: Callable[[], None] | None = None


class Inputs(NamedTuple):
    """The inputs of a micro-batch (data/inputs.py) on the device, int64 [T] each.

    Later stages of a pipeline have in place of `tokens` the residual stream [R,C] that arrives from the stage before.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor


@dataclass
class StepTimes:
    """The times and losses of a step on this rank, with each micro-batch's number in the plan."""

    began: Mark
    data_wait_s: float = 0.0  # time that the host waited for inputs to be read
    marks: list[tuple[int, Mark, Mark]] = field(default_factory=list)  # number, start, end
    losses: list[tuple[int, Tensor]] = field(default_factory=list)  # number, summed loss

    def spans(self) -> list[tuple[int, float, float]]:
        """Return (micro-batch number, start, end) in seconds from the start of the step. Waits for the device."""
        return [(number, _seconds(self.began, start), _seconds(self.began, end)) for number, start, end in self.marks]


def run_step(
    plan: RankPlan, forward: Forward, backward: Callable[[Tensor], None], read_inputs: ReadInputs, context: RankContext
) -> tuple[Tensor, StepTimes]:
    """Run forward and backward of all micro-batches of this rank; in a pipeline, of its stage, in the plan's order.

    `read_inputs` reads the inputs of a micro-batch. Returns the summed loss, a float64 scalar on the device, and the
    times. Stages other than the last return the loss of their own layers, which balances experts, or 0.
    """
    # Losses are added on the device, so that the host need not wait for them, and in float64, so that the order of the
    # micro-batches, which depends on the plan, hardly changes the sum.
    loss_sum = torch.zeros((), dtype=torch.float64, device=context.device)
    times = StepTimes(_mark(context.device))
    start, pipeline = times.began, context.pipeline
    # The plan alone decides what runs next. If ranks chose by themselves, for example whatever is ready, two of them
    # could wait for each other forever.
    micros = list(plan.of_rank(context.hdp_rank))
    order = actions(plan, context.hdp_rank, pipeline.stage if pipeline else 0)
    running: dict[int, tuple[Tensor, Any]] = {}  # input and output of forward passes whose backward is to come
    results: dict[Pass, Tensor] = {}  # of passes, until they are sent
    context.prefixes.clear()
    number = 0  # of the pass, among those of this rank
    early = context.reduce_from_here if plan.overlaps(context.hdp_rank) else None
    progress.report("data", number)
    # Inputs are read one micro-batch ahead, in the order of the forward passes; backward passes need none.
    with closing(_load_ahead(_forward_order(order, micros), read_inputs, context.device)) as loaded:
        for kind, done in order:
            micro = micros[done.place]
            # Transfers run beside the passes. Only the pass that needs what arrives waits for it, in `input_of`.
            if kind != "run":
                _transfer(pipeline, kind, done, micro, results)
                continue
            arrived = pipeline.input_of(done) if pipeline else None
            if pipeline:
                start = _mark(context.device)  # a span does not include the wait for a stage
            if done.forward:
                micro, inputs, waited_s = next(loaded)
                times.data_wait_s += waited_s
                if context.offload is not None:
                    context.offload.begin(micro.offload, len(inputs.tokens))
                progress.report("forward", number)
                # What a stage receives is a leaf of its own autograd graph. The gradient of this leaf is what the stage
                # before it needs to continue the backward pass.
                given = inputs.tokens if arrived is None else arrived.requires_grad_()
                out = micro_batch_output(forward, micro, inputs._replace(tokens=given), context)
                stream, loss = out if isinstance(out, Between) else (out, out)
                running[done.place] = given, out
                if isinstance(out, Between):
                    results[done] = stream.detach()
                if loss is not None:
                    loss_sum += loss.detach()
                    times.losses.append((micro.index, loss.detach()))
            else:
                # The backward pass starts from the loss on the last stage, and elsewhere from the gradient that the
                # next stage has sent.
                given, out = running.pop(done.place)
                progress.report("backward", number)
                if early is not None and number == len(order) - 1:  # a marked plan has only passes, and this one last
                    early()
                backward(out if arrived is None else _loss_of(out, arrived))
                if given.grad is not None:
                    results[done] = given.grad
                progress.report("data", number + 1)
            number += 1
            end = _mark(context.device)
            if times.marks and times.marks[-1][0] == micro.index:  # one span, if the backward pass follows directly
                start = times.marks.pop()[1]
            times.marks.append((micro.index, start, end))
            start = end
    if pipeline:
        pipeline.finish()
    return loss_sum, times


def _loss_of(out: Between, gradient: Tensor) -> Tensor:
    """Return a scalar with the gradients of a stage: `gradient` for its residual stream, and those of its own loss."""
    loss = with_gradient(out.stream, gradient)
    return loss if out.loss is None else loss + out.loss


def _forward_order(order: list[Action], micros: list[MicroBatch]) -> Iterator[MicroBatch]:
    """Yield micro-batches in the order of their forward passes."""
    return (micros[done.place] for kind, done in order if kind == "run" and done.forward)


def _transfer(pipeline: Pipeline | None, kind: str, done: Pass, micro: MicroBatch, results: dict[Pass, Tensor]) -> None:
    """Start to send the result of a pass of this stage, or to receive that of a neighbour's pass."""
    assert pipeline is not None
    progress.reach("transfer")
    if kind == "send":
        pipeline.send(done, results.pop(done))
    else:
        pipeline.receive(done, _tokens(micro))


@torch.no_grad()
def evaluate(plan: RankPlan, model: nn.Module, read_inputs: ReadInputs, context: RankContext) -> Tensor:
    """Run only the forward passes of a plan, and return the summed cross-entropy of this rank's tokens.

    The result is a float64 scalar on the device. Idle micro-batches add nothing to it, but must run: under ZeRO-3
    all ranks gather parameters together in every slot. In a pipeline, stages other than the last return 0.
    """
    model.eval()
    loss_sum = torch.zeros((), dtype=torch.float64, device=context.device)
    pipeline, micros = context.pipeline, list(plan.of_rank(context.hdp_rank))
    order = actions(plan, context.hdp_rank, pipeline.stage if pipeline else 0, backward=False)
    results: dict[Pass, Tensor] = {}
    context.prefixes.clear()
    progress.report("validate")
    with closing(_load_ahead(_forward_order(order, micros), read_inputs, context.device)) as loaded:
        for kind, done in order:
            if kind != "run":
                _transfer(pipeline, kind, done, micros[done.place], results)
                if pipeline:
                    pipeline.finish(_LEAVING)  # nothing comes back from the next stage that would free what was sent
                continue
            micro, inputs, _ = next(loaded)
            progress.report("validate", done.place)
            arrived = pipeline.input_of(done) if pipeline else None
            given = inputs.tokens if arrived is None else arrived
            out = micro_batch_output(model, micro, inputs._replace(tokens=given), context)
            if isinstance(out, Between):
                results[done] = out.stream
            else:
                loss_sum += out
    if pipeline:
        pipeline.finish()
    model.train()
    return loss_sum


def micro_batch_output(forward: Forward, micro: MicroBatch, inputs: Inputs, context: RankContext) -> Any:
    """Compute the summed loss of a micro-batch, a scalar, or `Between` in a stage that is not the last.

    The loss of an idle micro-batch is a zero that is connected to the autograd graph.
    """
    most = rounds_per_call(context.pipeline.stages if context.pipeline else 1)
    shards = layout(micro, most) if micro.shards else idle(len(inputs.positions))
    attention = AttentionContext(shards, context.comm, context.kernel, context.prefixes)
    return forward(inputs.tokens, inputs.positions, inputs.labels, attention)


def _tokens(micro: MicroBatch) -> int:
    """Return the tokens of a micro-batch on this rank, as its inputs have."""
    return layout(micro).tokens if micro.shards else len(idle_inputs().tokens)


def to_device(inputs: RankInputs, device: torch.device) -> Inputs:
    """Copy inputs to the device on the current stream, from pinned memory so that the host does not wait."""
    parts = [torch.from_numpy(part) for part in (inputs.tokens, inputs.labels, inputs.positions)]
    if device.type == "cuda":
        parts = [part.pin_memory() for part in parts]
    return Inputs(*(part.to(device, non_blocking=True) for part in parts))


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    # One stream for the whole run, because PyTorch's allocator caches memory per stream.
    return torch.cuda.Stream(device)


def _load_ahead(
    micros: Iterator[MicroBatch], read_inputs: ReadInputs, device: torch.device
) -> Generator[tuple[MicroBatch, Inputs, float], None, None]:
    """Yield each micro-batch with its inputs and the seconds that the host waited for them.

    A thread reads and copies the inputs of the next micro-batch while the caller computes.
    """
    side = _copy_stream(device) if device.type == "cuda" else None

    def load(micro: MicroBatch) -> tuple[Inputs, torch.cuda.Event | None]:
        inputs = read_inputs(micro)
        if side is None:
            return to_device(inputs, device), None
        with torch.cuda.stream(side):
            return to_device(inputs, device), side.record_event()

    # A new thread uses device 0 by default; if the rank has another device, that would create an unused CUDA context.
    on_device = (torch.cuda.set_device, (device,)) if side is not None else (None, ())
    with ThreadPoolExecutor(1, "inputs", *on_device) as reader:
        mine = list(micros)
        loading = [reader.submit(load, micro) for micro in mine[:1]]
        for micro, following in zip_longest(mine, mine[1:]):
            began = time.perf_counter()
            inputs, copied = loading.pop().result()
            waited_s = time.perf_counter() - began
            # Submitted before the caller gets its own inputs: the thread reads while the caller computes.
            if following is not None:
                loading.append(reader.submit(load, following))
            if copied is not None:
                computing = torch.cuda.current_stream(device)
                computing.wait_event(copied)
                # They were allocated on the side stream, which must not reuse their memory before the computation has.
                for tensor in inputs:
                    tensor.record_stream(computing)
            yield micro, inputs, waited_s


def _mark(device: torch.device) -> Mark:
    """Return the current time; on a GPU, an event that the device records when it has done the work so far."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start: Mark, end: Mark) -> float:
    """Return the seconds between two points in time. Waits until a GPU has reached `end`."""
    if isinstance(start, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000
    assert isinstance(end, float)
    return end - start
