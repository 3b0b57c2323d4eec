"""Rings for tests: split and joined tensors of sequences, dense attention, and a transport within one process.

A case is a list of sequences, each with its length and its ring; every rank has one micro-batch, with its shards in the
order of the sequences. A sequence may be cut into slices: then each rank has a micro-batch for each number of a slice,
runs all of them forward, and then backward in reverse order. Splitting is implemented here a second time, with NumPy,
to detect mistakes in `schedule`.
Letters: N tokens of all sequences of a case, T tokens of one rank, H query heads, G key and value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from queue import Queue
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.buffers import Buffers
from engine.attention.comm import Comm, Exchange
from engine.attention.kernels.call import Call, Kernel
from engine.attention.kernels.choice import choose
from engine.attention.layout import Layout, ShardRows, layout
from engine.attention.prefix import Prefixes
from engine.attention.ring import attend
from engine.close import error
from engine.planner.plan.step_plan import MicroBatch, Shard
from tests.attention.gpu_like import GPU_LIKE

CPU = torch.device("cpu")
PATIENCE_S = 10  # a message that has not come by then does not come
LONGEST_PLAIN = 1600  # tokens
NAMES = ("out", "dq", "dk", "dv")
Four = tuple[Tensor, ...]  # out, dq, dk, dv


class Placed(NamedTuple):
    """A sequence, the ordered ranks that share it, the lengths of its slices if it is cut, and its teams' size."""

    length: int
    ring: tuple[int, ...]
    slices: tuple[int, ...] = ()
    team: int = 1

    @property
    def cut(self) -> tuple[int, ...]:
        return self.slices or (self.length,)


def unsplit(tokens: int) -> Layout:
    """Create the layout of one unsplit sequence of `tokens` tokens, which may be 0."""
    rows = (ShardRows(0, tokens, tokens, ring=False),) if tokens else ()
    return Layout(tokens, tuple(sorted({0, tokens})), (), rows)


@dataclass(frozen=True)
class Case:
    """Sequences on ranks, and the shape, dtype and seed of their tensors."""

    sequences: tuple[Placed, ...]
    world: int
    heads: int = 2
    groups: int = 1
    head_dim: int = 4
    dtype: torch.dtype = torch.float64
    seed: int = 0
    scale: float = 1  # of q and k
    kernel: str | None = None
    rounds_per_call: int = 1  # rounds of a call

    @property
    def tokens(self) -> int:
        return sum(sequence.length for sequence in self.sequences)

    def inputs(self) -> Four:
        """Return q [N,H,D], k and v [N,G,D] and the output's gradient [N,H,D], all sequences one after the other."""
        generator = torch.Generator().manual_seed(self.seed)
        heads = (self.heads, self.groups, self.groups, self.heads)
        shapes = ((self.tokens, count, self.head_dim) for count in heads)
        q, k, v, dout = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        return tuple(x.to(self.dtype) for x in (q * self.scale, k * self.scale, v, dout))

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of each rank."""
        return max(len(sequence.cut) for sequence in self.sequences)

    def micro_batch(self, rank: int, turn: int = 0) -> MicroBatch:
        """Return a rank's micro-batch with the slices number `turn`."""
        shards = []
        for number, one in enumerate(self.sequences):
            if rank in one.ring and turn < len(one.cut):
                earlier, later = one.cut[:turn], sum(one.cut[turn + 1 :])
                part = one.ring.index(rank)
                shards.append(Shard(number, one.cut[turn], one.ring, part, earlier, later, one.team))
        return MicroBatch(index=rank, rank=rank, gang=0, slot=-1, shards=tuple(shards))

    def rows_of(self, rank: int, turn: int) -> Tensor:
        """Return which of the N tokens a micro-batch of a rank holds, in its order: [T]."""
        rows, start = [np.zeros(0, dtype=np.int64)], 0
        for one in self.sequences:
            if rank in one.ring and turn < len(one.cut):
                begin = start + sum(one.cut[:turn])
                chunks = np.array_split(np.arange(begin, begin + one.cut[turn]), 2 * len(one.ring))
                part = one.ring.index(rank)
                rows += [chunks[part], chunks[-1 - part]]
            start += one.length
        return torch.from_numpy(np.concatenate(rows))

    def rows(self, rank: int) -> Tensor:
        """Return which of the N tokens a rank holds, in its order, micro-batch by micro-batch."""
        return torch.cat([self.rows_of(rank, turn) for turn in range(self.micro_batches)])


def dense(case: Case) -> Four:
    """Return out, dq, dk, dv in float64, one unsplit sequence at a time: of plain attention.

    Of sequences too long for that, of one call of the CPU kernel, which its own tests hold to plain attention.
    """
    q, k, v, dout = (x.double() for x in case.inputs())
    parts, start = [], 0
    for length, *_ in case.sequences:
        rows = slice(start, start + length)
        by = attention if length <= LONGEST_PLAIN else one_call
        parts.append(by(q[rows], k[rows], v[rows], dout[rows], causal=True))
        start += length
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def attention(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> Four:
    """Return out, dq, dk, dv of softmax(q k / sqrt(D)) v by autograd."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, keys) / q.shape[2] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), float("-inf"))
    out = torch.einsum("hts,shd->thd", scores.softmax(-1), values)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))


def one_call(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> Four:
    """Return out, dq, dk, dv of one sequence by one call of the CPU kernel."""
    kernel, call = choose(CPU, q.dtype, q.shape[2]), Call((0, len(q)), (0, len(k)), causal)
    out, lse = kernel.forward(q, k, v, call)
    return (out, *kernel.backward(dout, q, k, v, out, lse, call))


def on_rank(case: Case, rank: int, comm: Comm) -> Four:
    """Return out, dq, dk, dv of a rank's micro-batches, forward and backward through the rings."""
    kernel = GPU_LIKE if case.kernel == "gpu_like" else choose(CPU, case.dtype, case.head_dim, case.kernel)
    prefixes, ran, found = Prefixes(), list[tuple[Tensor, Four, Tensor]](), list[Four]()
    for turn in range(case.micro_batches):
        micro, rows = case.micro_batch(rank, turn), case.rows_of(rank, turn)
        q, k, v, dout = (x[rows] for x in case.inputs())
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        one = layout(micro, case.rounds_per_call) if micro.shards else unsplit(0)
        ran.append((attend(q, k, v, one, comm, strict(kernel), prefixes, layer=7), (q, k, v), dout))
    for out, inputs, dout in reversed(ran):
        found.append((out.detach(), *torch.autograd.grad(out, inputs, dout)))
    assert len(prefixes) == 0, "K,V are kept after the last backward pass"
    return tuple(torch.cat(parts) for parts in zip(*reversed(found), strict=True))


def strict(kernel: Kernel) -> Kernel:
    """Return the kernel, refusing a call without sequences or one with an empty side, which may kill the process."""

    def checked(call: Call) -> None:
        for bounds in (call.q_bounds, call.kv_bounds):
            assert len(bounds) > 1 and all(start < stop for start, stop in pairwise(bounds)), call

    def forward(*arguments: Any) -> Any:
        checked(arguments[-1])
        return kernel.forward(*arguments)

    def backward(*arguments: Any) -> Any:
        checked(arguments[-1])
        return kernel.backward(*arguments)

    return replace(kernel, forward=forward, backward=backward)


def joined(case: Case, ranks: Sequence[Four]) -> Four:
    """Return the N rows of each tensor, from those of the ranks. Raises if a token is not on exactly one rank."""
    rows = torch.cat([case.rows(rank) for rank in range(case.world)])
    assert sorted(rows.tolist()) == list(range(case.tokens))
    return tuple(torch.cat(parts)[rows.argsort()] for parts in zip(*ranks, strict=True))


def in_process(case: Case) -> Four:
    """Return out, dq, dk, dv of the case, each rank a thread."""
    links = links_between(case.world)
    with ThreadPoolExecutor(case.world) as pool:
        futures = [pool.submit(partial(on_rank, case, rank, ThreadComm(rank, links))) for rank in range(case.world)]
        return joined(case, [future.result() for future in futures])


def errors(results: Four, expected: Four) -> dict[str, float]:
    """Return max|a - b| / max|b| of each; where b is nothing but rounding (one token has no dq, dk), of its size."""
    return {name: error(a, b, least=1e-3) for name, a, b in zip(NAMES, results, expected, strict=True)}


def rms(results: Four, expected: Four) -> dict[str, float]:
    """Return the root of the mean square of a - b."""
    return {
        name: float((a.double() - b).pow(2).mean().sqrt().nan_to_num(nan=torch.inf))
        for name, a, b in zip(NAMES, results, expected, strict=True)
    }


Links = dict[tuple[int, int], "Queue[Tensor]"]  # messages under way by (source, target), in the order of posting


def links_between(world: int) -> Links:
    return {(source, target): Queue() for source in range(world) for target in range(world)}


class ThreadComm:
    """A transport between threads, as strict as a transport may be.

    A buffer under way may be read or written at any moment until `wait`: what is sent is kept and must not change, what
    is received is spoilt until then. A message of another shape or dtype than its receiver expects fails.
    """

    def __init__(self, rank: int, links: Links) -> None:
        self.rank, self.links, self.buffers = rank, links, Buffers()
        self.bytes_sent = 0

    def post(self, exchanges: Sequence[Exchange]) -> Flight:
        kept, expected = [], []
        for send, next_rank, receive, previous_rank in exchanges:
            assert send.is_contiguous() and receive.is_contiguous()
            if send.numel():
                kept.append((send, send.clone()))
                self.bytes_sent += send.numel() * send.element_size()
                self.links[self.rank, next_rank].put(kept[-1][1])
            if receive.numel():
                receive.fill_(float("nan") if receive.is_floating_point() else -1)
                expected.append((receive, self.links[previous_rank, self.rank]))
        return Flight(kept, expected)


class Flight(NamedTuple):
    """Messages under way."""

    kept: list[tuple[Tensor, Tensor]]
    expected: list[tuple[Tensor, Queue[Tensor]]]

    def wait(self) -> None:
        for buffer, link in self.expected:
            message = link.get(timeout=PATIENCE_S)
            assert (message.shape, message.dtype) == (buffer.shape, buffer.dtype), "another message was expected"
            buffer.copy_(message)
        for buffer, message in self.kept:
            assert torch.equal(buffer, message), "a buffer changed while it was sent"
