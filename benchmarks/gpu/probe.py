"""Questions about attention kernels that only a GPU answers: cuDNN's execution plans, its wrong gradients, and rings.

`python benchmarks/gpu/probe.py [--json FILE] [--only QUESTION]` should take about two minutes on an H200:

    builds     milliseconds of the first and of the next call of cuDNN with a shape, forward and backward; in another
               thread too, as autograd's. Shapes are those of real plans (`plans.py`)
    low        gradients that are not finite where the log-sum-exp is about -120, by kernel and shape
    ring       a ring of eight on one device against attention in float64, with lengths that do not divide evenly; with
               one round a call, and as in pipelines, with several of them and with teams. Blocks are merged as in
               training, and also by the uncompiled merge
    rates      TFLOP/s of cuDNN and of the varlen kernel, forward and backward
    agreement  largest difference between both kernels at long lengths, relative to the largest element

The answers are written after each question. Exit codes: 1 if a question fails, 4 if a ring is wrong, 3 without a CUDA
device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu import on_gpu, plans
from benchmarks.gpu.on_gpu import Row
from engine.attention import ring as ring_attention
from engine.attention.buffers import Buffers
from engine.attention.comm import Exchange
from engine.attention.kernels import cpu, cudnn, reference, torch_varlen
from engine.attention.kernels.call import Call, Functions, Kernel, Merge, merge
from engine.attention.kernels.plans import PlanCosts, Plans
from engine.attention.layout import layout
from engine.attention.merge import choose as choose_merge
from engine.attention.prefix import Prefixes
from engine.close import error
from engine.planner.plan.schedule import shard_spans
from engine.planner.plan.step_plan import MicroBatch, Shard

DTYPE = torch.bfloat16
BACKWARD = 2.5  # FLOPs of the backward pass, as a multiple of the forward pass
LOW = -120.0  # log-sum-exp; exp(-LOW) overflows in float32
PATIENCE_S = 60.0  # a message of a ring that has not come by then does not come
_Shape = tuple[int, int, bool]  # queries, keys, causal


@dataclass(frozen=True)
class Sizes:
    """The sizes to ask with."""

    heads: int = 32
    kv_heads: int = 8
    head_dims: tuple[int, ...] = (128, 64)
    capacity: int = 8192
    context: int = 65536
    shapes: int = 3  # causal ones and blocks of rings, each
    lengths: tuple[int, ...] = (8192, 32768, 65536)
    repeats: int = 5
    # Queries and keys. cuDNN is reported to be wrong for 64 keys modulo 128, and for one query.
    low: tuple[tuple[int, int], ...] = ((4160, 4160), (8192, 4160), (4160, 4224), (1, 4224), (4096, 64), (4160, 4161))
    pairs: tuple[_Shape, ...] = ((65536, 65536, True), (16384, 8192, False), (8192, 16384, False))
    rings: tuple[int, ...] = (1537, 2051)
    degree: int = 8
    forms: tuple[tuple[int, int], ...] = ((1, 1), (4, 1), (4, 2))  # of rings: rounds a call, ranks of a team


TINY = Sizes(
    4,
    2,
    (16,),
    256,
    1024,
    2,
    (64, 128),
    2,
    low=((72, 64), (1, 96)),
    pairs=((128, 128, True), (64, 32, False)),
    rings=(67,),
)


class Kernels(NamedTuple):
    """The kernels to compare. A dry run has others in their places."""

    cudnn: Functions
    varlen: Functions

    @classmethod
    def on(cls, device: torch.device) -> Kernels:
        if device.type == "cuda":
            return cls(_AllCudnn(Plans(PlanCosts(0.0)), torch_varlen.load()).functions(), torch_varlen.load())
        return cls(cpu.load(), reference.load())


class _AllCudnn(cudnn._Cudnn):
    """Uses cuDNN for calls of one shape, also for those that it is known to compute wrongly."""

    def _parts(self, call: Call, *shape: Any, **more: Any) -> tuple[cudnn._Part, ...]:
        return (cudnn._Part(True, slice(None), slice(None), call),)


@dataclass(frozen=True)
class Probe:
    """What all questions need."""

    device: torch.device
    sizes: Sizes
    kernels: Kernels

    def tensors(self, queries: int, keys: int, head_dim: int | None = None) -> tuple[Tensor, ...]:
        """Random q, k, v and gradient of the output."""
        heads, kv_heads, dim = self.sizes.heads, self.sizes.kv_heads, head_dim or self.sizes.head_dims[0]
        shapes = ((queries, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, dim), (queries, heads, dim))
        return tuple(torch.randn(shape, device=self.device, dtype=DTYPE) for shape in shapes)

    def timed(self, kernel: Functions, shape: _Shape, head_dim: int | None = None) -> tuple[float, float]:
        """Milliseconds of one call, forward and backward."""
        queries, keys, causal = shape
        call, (q, k, v, dout) = Call((0, queries), (0, keys), causal), self.tensors(queries, keys, head_dim)
        found: list[tuple[Tensor, Tensor]] = []
        forward = on_gpu.milliseconds(lambda: found.append(kernel.forward(q, k, v, call)), self.device)
        (out, lse), derive = found[0], kernel.backward
        return forward, on_gpu.milliseconds(lambda: derive(dout, q, k, v, out, lse, call), self.device)


def main() -> None:
    """Ask all questions, or the selected one, and print the answers."""
    options = on_gpu.parse_options(__doc__, tuple(QUESTIONS))
    device = on_gpu.device_of(options)
    probe = Probe(device, TINY if options.dry_run else Sizes(), Kernels.on(device))
    rows: list[Row] = []
    for name in [options.only] if options.only else QUESTIONS:
        try:
            found = [{"question": name} | row for row in QUESTIONS[name](probe)]
        except Exception as fault:
            found = [on_gpu.failed({"question": name}, fault)]
        rows += found
        for row in found:
            print(", ".join(f"{key} {_short(value)}" for key, value in row.items()), flush=True)
        on_gpu.write(options.json, device, rows=rows)
    on_gpu.leave(rows, options.dry_run)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def builds(probe: Probe) -> list[Row]:
    """Time the first call and the next with each shape, then the first shape in another thread."""

    def row(shape: _Shape, thread: str) -> Row:
        first, then = (probe.timed(probe.kernels.cudnn, shape) for _ in range(2))
        names = ("first_forward_ms", "first_backward_ms", "then_forward_ms", "then_backward_ms")
        queries, keys, causal = shape
        shown = {"queries": queries, "keys": keys, "causal": causal, "thread": thread}
        return shown | dict(zip(names, (*first, *then), strict=True))

    shapes = planned_shapes(probe.sizes)
    rows = [row(shape, "main") for shape in shapes]
    with ThreadPoolExecutor(1) as other:
        return [*rows, other.submit(row, shapes[0], "another").result()]


def planned_shapes(sizes: Sizes) -> list[_Shape]:
    """Return shapes of attention calls in real plans, those with the most (query, key) pairs first.

    `sizes.shapes` of them are unsplit sequences, and as many are blocks of rings.
    """
    config = plans.config_of(8, sizes.capacity, sizes.context, 64 * sizes.capacity)
    whole, blocks = set(), set()
    for micro in (micro for step in plans.planned(config, steps=4) for micro in step):
        whole |= {(shard.length, shard.length, True) for shard in micro.shards if shard.degree == 1}
        one = layout(micro)
        for number in range(one.calls("forward")):
            blocks |= {(block.rows.stop - block.rows.start, sum(block.keys), False) for block in one.blocks(number)}
    longest = [sorted(shapes, key=lambda shape: -shape[0] * shape[1])[: sizes.shapes] for shapes in (whole, blocks)]
    return [*longest[0], *longest[1]]


def low(probe: Probe) -> list[Row]:
    """Count the gradients that are not finite where all scores are about LOW."""
    rows = []
    for queries, keys in probe.sizes.low:
        q, k, v, dout = probe.tensors(queries, keys)
        q, k = 0.1 * q, 0.1 * k
        q[..., 0], k[..., 0] = 1.0, LOW * q.shape[-1] ** 0.5
        call = Call((0, queries), (0, keys), causal=False)
        for name, kernel in probe.kernels._asdict().items():
            out, lse = kernel.forward(q, k, v, call)
            gradients = kernel.backward(dout, q, k, v, out, lse, call)
            bad = [int((~x.isfinite()).sum()) for x in gradients]
            rows.append({"queries": queries, "keys": keys, "kernel": name, "lse": float(lse.max()), "not_finite": bad})
    return rows


def rates(probe: Probe) -> list[Row]:
    """Measure TFLOP/s of one causal sequence."""
    rows = []
    for head_dim in probe.sizes.head_dims:
        for length in probe.sizes.lengths:
            flops = 4 * head_dim * probe.sizes.heads * length * (length + 1) / 2
            for name, kernel in probe.kernels._asdict().items():
                run = partial(probe.timed, kernel, (length, length, True), head_dim)
                times = [run() for _ in range(2 + probe.sizes.repeats)][2:]
                forward, backward = (median(of_pass) for of_pass in zip(*times, strict=True))
                tflops = {"forward_tflops": flops / forward / 1e9, "backward_tflops": BACKWARD * flops / backward / 1e9}
                rows.append({"head_dim": head_dim, "length": length, "kernel": name} | tflops)
    return rows


def agreement(probe: Probe) -> list[Row]:
    """Compare both kernels: out, log-sum-exp, dq, dk, dv."""
    rows = []
    for queries, keys, causal in probe.sizes.pairs:
        q, k, v, dout = probe.tensors(queries, keys)
        call, found = Call((0, queries), (0, keys), causal), []
        for kernel in probe.kernels:
            out, lse = kernel.forward(q, k, v, call)
            found.append((out, lse, *kernel.backward(dout, q, k, v, out, lse, call)))
        differences = [error(a, b) for a, b in zip(*found, strict=True)]
        rows.append({"queries": queries, "keys": keys, "causal": causal, "difference": differences})
    return rows


def ring(probe: Probe) -> list[Row]:
    """Compare a ring of ranks on one device, as threads, with attention in float64: out, dq, dk, dv."""
    selected, *others = merges(probe).items()
    # Every thread builds its own plans of cuDNN, so a row may take seconds: the other merge has the first length only.
    lengths = probe.sizes.rings
    cases = [(selected, length) for length in lengths] + [(other, lengths[0]) for other in others]
    return [
        {"tokens": length, "merge": name, **ring_errors(probe, length, blocks_merge, *ring_form)}
        for (name, blocks_merge), length in cases
        for ring_form in probe.sizes.forms
    ]


def merges(probe: Probe) -> dict[str, Merge]:
    """The merge of a ring's blocks that training selects, and the uncompiled one, by name."""
    selected = choose_merge(probe.device, DTYPE, probe.sizes.heads, probe.sizes.head_dims[0])
    return {"uncompiled": merge} if selected is merge else {"compiled": selected, "uncompiled": merge}


def ring_errors(probe: Probe, length: int, blocks_merge: Merge, rounds_per_call: int, team: int) -> Row:
    """Run a ring with this merge on one sequence of `length` tokens, and compare it with attention in float64."""
    degree, device = probe.sizes.degree, probe.device
    # As in training, but with plans at once: other shapes of a call use the varlen kernel.
    functions = cudnn.load(0.0) if device.type == "cuda" else probe.kernels.cudnn
    kernel = Kernel("cudnn", "asked by the probe", *functions, merge=blocks_merge)
    q, k, v, dout = probe.tensors(length, length)
    exact_q, exact_k, exact_v = (x.double() for x in (q, k, v))
    call = Call((0, length), (0, length), causal=True)
    out, lse = reference.forward(exact_q, exact_k, exact_v, call)
    exact = (out, *reference.backward(dout.double(), exact_q, exact_k, exact_v, out, lse, call))
    spans = [shard_spans(length, degree, part) for part in range(degree)]
    own = [torch.cat([torch.arange(span.start, span.stop) for span in of_rank]).to(device) for of_rank in spans]
    links = {(source, target): Queue[Tensor]() for source in range(degree) for target in range(degree)}

    def rank(part: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        shard = Shard(0, length, tuple(range(degree)), part, team=team)
        one = layout(MicroBatch(index=0, rank=part, gang=0, slot=-1, shards=(shard,)), rounds_per_call)
        return both_passes(tensors, one, Threads(part, links), kernel)

    with ThreadPoolExecutor(degree) as pool:
        ranks = [pool.submit(rank, part, [x[rows_] for x in (q, k, v, dout)]) for part, rows_ in enumerate(own)]
        faults = [fault for fault in (one.exception() for one in ranks) if fault is not None]
        if faults:  # one is the cause; the neighbours of that rank wait in vain
            raise min(faults, key=lambda fault: isinstance(fault, Empty))
        parts = [one.result() for one in ranks]
    order = torch.cat(own).argsort()
    found = [torch.cat(of_ranks)[order] for of_ranks in zip(*parts, strict=True)]
    errors = [error(a, b) for a, b in zip(found, exact, strict=True)]
    shape = {"ranks": degree, "rounds_per_call": rounds_per_call, "team": team}
    return shape | {"errors": errors, "holds": max(errors) < 0.03}


def both_passes(tensors: Sequence[Tensor], one: Any, comm: Threads, kernel: Kernel) -> list[Tensor]:
    """Return out, dq, dk, dv of one rank of a ring.

    Calls the two passes of ring attention directly: autograd has one thread per device, in which the first rank's
    backward pass would wait forever for that of the next rank.
    """
    q, k, v, dout = tensors
    with torch.no_grad():
        rings = ring_attention.Rings(one, comm, kernel, Prefixes(), layer=0)
        out, lse = ring_attention._forward(q, k, v, rings)
        saved = ring_attention._Saved(dout, q, k, v, out.to(q.dtype), lse)
        return [out, *ring_attention._backward(saved, rings)]


Links = dict[tuple[int, int], "Queue[Tensor]"]  # messages on their way, by (source, target)


class Threads:
    """The communication of a ring whose ranks are threads that use one stream of one device."""

    def __init__(self, rank: int, links: Links) -> None:
        self.buffers = Buffers()
        self._rank, self._links = rank, links
        self._expected: list[tuple[Tensor, int]] = []

    def post(self, exchanges: Sequence[Exchange]) -> Threads:
        """Send copies; `wait` receives."""
        for send, next_rank, receive, previous_rank in exchanges:
            if send.numel():
                self._links[self._rank, next_rank].put(send.clone())
            if receive.numel():
                self._expected.append((receive, previous_rank))
        return self

    def wait(self) -> None:
        for receive, previous_rank in self._expected:
            receive.copy_(self._links[previous_rank, self._rank].get(timeout=PATIENCE_S))
        self._expected.clear()


QUESTIONS: dict[str, Callable[[Probe], list[Row]]] = {
    "builds": builds,
    "low": low,
    "ring": ring,
    "rates": rates,
    "agreement": agreement,
}


if __name__ == "__main__":
    main()
