"""Ring attention: executes the schedule of a micro-batch, one autograd Function a layer.

Round 0 is one packed causal call over all shards, whole sequences and ring shards alike. Then all rings advance
together, round by round: the next part's K,V travel while the present block is computed, and blocks are merged.

Letters: T tokens of this rank in the micro-batch, H query heads, G key and value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.attention.comm import Comm, Exchange, Pending
from engine.attention.kernels.call import Call, Kernel
from engine.attention.layout import Layout
from engine.dtypes import wider
from engine.planner.schedule import Direction, Kind


def attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout, comm: Comm | None, kernel: Kernel) -> Tensor:
    """Return causal attention within each sequence of the micro-batch, [T,H,D], in the dtype of `q`.

    q is [T,H,D], k and v are [T,G,D]. `comm` may be None where the layout has no ring. All members of a ring call this
    for the same layer in the same order, forward and backward. Raises ValueError where the arguments do not belong
    together: what came out would be uninitialised memory.
    """
    if len(q) != layout.tokens:
        raise ValueError(f"{len(q)} tokens for a layout of {layout.tokens}")
    if layout.rings and comm is None:
        raise ValueError("a layout with rings needs a comm")
    return _RingAttention.apply(q, k, v, layout, comm, kernel)  # type: ignore[no-any-return]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: Layout, comm: Comm | None, kernel: Kernel) -> Tensor:
        out, lse = _forward(q, k, v, layout, comm, kernel)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.comm, ctx.kernel = layout, comm, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _backward(_Saved(dout, *ctx.saved_tensors), ctx.layout, ctx.comm, ctx.kernel)
        return *(gradient.to(dout.dtype) for gradient in gradients), None, None, None


class _Saved(NamedTuple):
    """What the backward pass starts from; `out` and `lse` are the merged ones, which blocks need."""

    dout: Tensor  # [T,H,D]
    q: Tensor  # [T,H,D]
    k: Tensor  # [T,G,D]
    v: Tensor  # [T,G,D]
    out: Tensor  # [T,H,D]
    lse: Tensor  # [T,H]


class _Block(NamedTuple):
    """Queries `rows` of this rank meet the first keys of the part that ring number `ring` holds; neither is empty."""

    ring: int
    rows: slice
    kv: Tensor  # [2,S,G,D]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, comm: Comm | None, kernel: Kernel
) -> tuple[Tensor, Tensor]:
    """Return the merged output [T,H,D] and log-sum-exp [T,H]; with rings in the wider dtype, else in the kernel's."""
    held = _pack("kv", k, v, layout, comm)
    out, lse = torch.empty_like(q[:0]), q.new_empty((0, q.shape[1]), dtype=wider(q.dtype))  # of no token
    for round_ in range(layout.rounds("forward")):
        pending, arriving, _ = _post(layout, round_, "forward", comm, held, [])
        if round_ == 0 and layout.tokens:
            out, lse = _widened(layout, *kernel.forward(q, k, v, Call(layout.bounds, layout.bounds, causal=True)))
        elif blocks := _blocks(layout, round_, held):
            part_out, part_lse = kernel.forward(_rows(q, blocks), *_keys(blocks), _call(blocks))
            for block, o, part in zip(blocks, *_split(blocks, part_out, part_lse), strict=True):
                _merge(out[block.rows], lse[block.rows], o, part)
        _wait(pending)
        held = arriving
    return out, lse


def _backward(saved: _Saved, layout: Layout, comm: Comm | None, kernel: Kernel) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq [T,H,D], dk and dv [T,G,D]; with rings in the wider dtype, in which dK,dV also travel."""
    dout, q, k, v, out, lse = saved
    held, sums = _pack("kv", k, v, layout, comm), list[Tensor]()
    dq, dk, dv = _widened(layout, *(torch.empty_like(x[:0]) for x in (q, k, v)))  # of no token
    for round_ in range(layout.rounds("backward")):
        pending, arriving, sums_arriving = _post(layout, round_, "backward", comm, held, sums)
        blocks = _blocks(layout, round_, held) if round_ else []
        if round_ == 0 and layout.tokens:
            dq, dk, dv = _widened(layout, *kernel.backward(*saved, Call(layout.bounds, layout.bounds, causal=True)))
        elif blocks:
            inputs = (_rows(dout, blocks), _rows(q, blocks), *_keys(blocks), _rows(out, blocks), _rows(lse, blocks))
            shares = kernel.backward(*inputs, _call(blocks))
        _wait(pending)
        held, sums = arriving, sums_arriving if round_ else _pack("dkv", dk, dv, layout, comm)
        if blocks:
            _add_shares(dq, sums, blocks, *shares)
    for ring, home in zip(layout.rings, sums, strict=True):
        dk[ring.rows], dv[ring.rows] = home
    return dq, dk, dv


def _widened(layout: Layout, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return what blocks of rings are merged into or added to in the wider dtype; without rings nothing is."""
    return tuple(x.to(wider(x.dtype)) for x in tensors) if layout.rings else tensors


def _pack(kind: Kind, k: Tensor, v: Tensor, layout: Layout, comm: Comm | None) -> list[Tensor]:
    """Return a buffer [2,S,G,D] of each ring shard's keys and values: one message instead of two."""
    if comm is None:
        return []
    comm.buffers.fit(kind, layout, k)
    packed = [comm.buffers.take(kind, number, 0, ring.tokens) for number, ring in enumerate(layout.rings)]
    for ring, buffer in zip(layout.rings, packed, strict=True):
        torch.stack((k[ring.rows], v[ring.rows]), out=buffer)
    return packed


def _post(
    layout: Layout, round_: int, direction: Direction, comm: Comm | None, held: list[Tensor], sums: list[Tensor]
) -> tuple[Pending | None, list[Tensor], list[Tensor]]:
    """Start a round's transfers; return them and the buffers (K,V and dK,dV) that hold the next round when they end."""
    exchanges, buffers = [], {"kv": list(held), "dkv": list(sums)}
    if comm is None or not layout.rings:
        return None, [], []
    for number, ring in enumerate(layout.rings):
        for kind, _, receive in ring.transfers(round_, direction):
            turn = round_ + 1 if kind == "kv" else round_  # our K,V leave in round 0, our dK,dV in round 1
            incoming = comm.buffers.take(kind, number, turn, ring.tokens_of(receive))
            exchanges.append(Exchange(buffers[kind][number], ring.next_rank, incoming, ring.previous_rank))
            buffers[kind][number] = incoming
    return comm.post(exchanges) if exchanges else None, buffers["kv"], buffers["dkv"]


def _wait(pending: Pending | None) -> None:
    if pending is not None:
        pending.wait()


def _blocks(layout: Layout, round_: int, held: list[Tensor]) -> list[_Block]:
    """Return the blocks of a round, without those that have an empty side: they would kill the kernel."""
    blocks = []
    for number, ring in enumerate(layout.rings):
        if round_ < ring.degree and not (block := ring.block(round_)).empty:
            rows = slice(ring.offset + block.q_start, ring.offset + block.q_stop)
            blocks.append(_Block(number, rows, held[number][:, : block.kv_stop]))
    return blocks


def _call(blocks: Sequence[_Block]) -> Call:
    queries = accumulate((block.rows.stop - block.rows.start for block in blocks), initial=0)
    keys = accumulate((block.kv.shape[1] for block in blocks), initial=0)
    return Call(tuple(queries), tuple(keys), causal=False)


def _rows(x: Tensor, blocks: Sequence[_Block]) -> Tensor:
    return x[blocks[0].rows] if len(blocks) == 1 else torch.cat([x[block.rows] for block in blocks])


def _keys(blocks: Sequence[_Block]) -> tuple[Tensor, Tensor]:
    kv = blocks[0].kv if len(blocks) == 1 else torch.cat([block.kv for block in blocks], dim=1)
    return kv[0], kv[1]


def _split(blocks: Sequence[_Block], *packed: Tensor) -> tuple[tuple[Tensor, ...], ...]:
    """Return packed rows as one piece a block."""
    sizes = [block.rows.stop - block.rows.start for block in blocks]
    return tuple(x.split(sizes) for x in packed)


def _merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge a block into the rows `out` [T,H,D] and `lse` [T,H], in place.

    Softmax over keys A and B together, from softmax over each (online softmax; Milakov and Gimelshein 2018):
        out = (exp(lse_A) out_A + exp(lse_B) out_B) / (exp(lse_A) + exp(lse_B))
    which overflows; the stable form, in one pass over the rows:
        out = out_A + sigmoid(lse_B - lse_A) (out_B - out_A)
    """
    out.lerp_(part_out.to(out.dtype), (part_lse - lse).sigmoid()[..., None])
    lse.copy_(torch.logaddexp(lse, part_lse))


def _add_shares(dq: Tensor, sums: list[Tensor], blocks: Sequence[_Block], *shares: Tensor) -> None:
    """Add the blocks' dq [T,H,D] to our queries, and their dk, dv [S,G,D] to what travels with the keys."""
    block_dq, block_dk, block_dv = shares
    sizes = [block.kv.shape[1] for block in blocks]
    for block, share in zip(blocks, *_split(blocks, block_dq), strict=True):
        dq[block.rows] += share
    for block, dk, dv in zip(blocks, block_dk.split(sizes), block_dv.split(sizes), strict=True):
        sums[block.ring][0, : len(dk)] += dk
        sums[block.ring][1, : len(dv)] += dv
