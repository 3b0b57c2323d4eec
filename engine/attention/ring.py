"""Ring attention: executes the ring schedule of a micro-batch, as one autograd Function per layer.

Round 0 is one packed causal call over all shards of the rank: unsplit sequences and ring shards. Then all rings advance
together, round by round. While a round computes its blocks, the K,V of the next round are being transferred. The
result of each block is merged into the output of the earlier rounds.

```
 round       0               1               2            on rank r of a ring
 compute     own shard       keys of r-1     keys of r-2
 receive     K,V of r-1      K,V of r-2      ...          from rank r-1
```
A slice of a sequence also attends to the earlier slices, whose K,V are in `Prefixes` and travel with its own. In a team
the ranks first exchange their queries, compute with those of the whole team, and exchange the results at the end.

Letters: T tokens of this rank in the micro-batch, R rows of queries: own ones and those of mates (layout.py), H query
heads, G key and value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.attention.comm import Comm, Exchange, Pending
from engine.attention.kernels.call import Kernel
from engine.attention.layout import Layout, RingBlock, RingShard, call_of
from engine.attention.prefix import Prefixes
from engine.dtypes import wider
from engine.planner.plan.schedule import Direction, Kind


class Rings(NamedTuple):
    """What the rings of a micro-batch need in one layer."""

    layout: Layout
    comm: Comm | None  # may be None for a layout without rings
    kernel: Kernel
    prefixes: Prefixes
    layer: int

    def prefix(self, ring: RingShard) -> list[Tensor]:
        """Return the K,V [2,S,G,D] of each earlier slice of a ring's sequence on this rank."""
        return self.prefixes.earlier(ring.shard.sequence, self.layer, len(ring.shard.earlier))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    comm: Comm | None,
    kernel: Kernel,
    prefixes: Prefixes | None = None,
    layer: int = 0,
) -> Tensor:
    """Compute causal attention within each sequence of a micro-batch. Returns [T,H,D] in the dtype of `q`.

    q is [T,H,D], k and v are [T,G,D]. `comm` may be None for a layout without rings, and `prefixes` for one without
    slices. All ranks of a ring must call this for the same layers in the same order, forward and backward. Raises
    ValueError if `q` has another number of tokens than `layout`, or if `layout` has rings and `comm` is None.
    """
    if len(q) != layout.tokens:
        raise ValueError(f"{len(q)} tokens for a layout of {layout.tokens}")
    if layout.rings and comm is None:
        raise ValueError("a layout with rings needs a comm")
    rings = Rings(layout, comm, kernel, Prefixes() if prefixes is None else prefixes, layer)
    out: Tensor = _RingAttention.apply(q, k, v, rings)
    if not torch.is_grad_enabled():
        for ring in layout.rings:
            if not ring.shard.later:
                rings.prefixes.drop(ring.shard.sequence, rings.layer)
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rings: Rings) -> Tensor:
        # A separate function, so that the tensors of the rounds are freed before the results are cast.
        out, lse = _forward(q, k, v, rings)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rings = rings
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _backward(_Saved(dout, *ctx.saved_tensors), ctx.rings)
        return *(gradient.to(dout.dtype) for gradient in gradients), None


class _Saved(NamedTuple):
    """The inputs of the backward pass. For each block, kernels need the merged `out` and `lse` over all keys."""

    dout: Tensor  # [T,H,D]
    q: Tensor  # [T,H,D]
    k: Tensor  # [T,G,D]
    v: Tensor  # [T,G,D]
    out: Tensor  # [T,H,D]
    lse: Tensor  # [T,H]


def _forward(q: Tensor, k: Tensor, v: Tensor, rings: Rings) -> tuple[Tensor, Tensor]:
    """Compute the output [T,H,D] and log-sum-exp [T,H]: in the wider dtype with rings, else in the kernel's."""
    layout, kernel = rings.layout, rings.kernel
    for ring in layout.rings:
        if ring.shard.later:
            number = len(ring.shard.earlier)
            rings.prefixes.put(ring.shard.sequence, rings.layer, number, k[ring.rows], v[ring.rows])
    held = _pack_kv(k, v, rings)
    (queries,) = _with_mates(rings, q)
    out, lse = torch.empty_like(q[:0]), q.new_empty((0, q.shape[1]), dtype=wider(q.dtype))  # if T is 0
    for round_ in range(layout.rounds("forward")):
        pending, arriving, _ = _post(rings, round_, "forward", held, [])
        if round_ == 0:
            if (call := layout.causal_call(pending is not None)) is not None:
                out, lse = kernel.forward(q, k, v, call)
            out, lse = _widened(layout, out, lse)
            out, lse = _extended(out, layout, 0.0), _extended(lse, layout, -torch.inf)
        if blocks := layout.blocks(round_):
            call = call_of(blocks, pending is not None)
            part_out, part_lse = kernel.forward(_rows(queries, blocks), *_keys(held, blocks), call)
            for block, o, part in zip(blocks, *_split(blocks, part_out, part_lse), strict=True):
                kernel.merge(out[block.rows], lse[block.rows], o, part)
        if pending is not None:
            pending.wait()
        held = arriving
    if layout.teams:
        for ring, part in _results_of_mates(torch.cat((out, lse[..., None]), dim=-1), rings):
            kernel.merge(out[ring.rows], lse[ring.rows], part[..., :-1], part[..., -1])
    return out[: layout.tokens], lse[: layout.tokens]


def _backward(saved: _Saved, rings: Rings) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dq [T,H,D], dk and dv [T,G,D].

    With rings they are in the wider dtype, also while dK,dV are transferred: in bf16 their error would grow with the
    degree of the ring. The dK,dV of a part follow its K,V around the ring, one round later, and each rank adds its
    contribution. In the last round they return to the rank that owns the part, where those of earlier slices wait for
    the backward passes of these.
    """
    layout, kernel = rings.layout, rings.kernel
    dout, q, k, v, out, lse = saved
    held, sums = _pack_kv(k, v, rings), list[Tensor]()
    douts, queries, outs, lses = _with_mates(rings, dout, q, out, lse)
    dq, dk, dv = _widened(layout, *(torch.empty_like(x[:0]) for x in (q, k, v)))  # if T is 0
    for round_ in range(layout.rounds("backward")):
        pending, arriving, sums_arriving = _post(rings, round_, "backward", held, sums)
        if round_ == 0:
            if (call := layout.causal_call(pending is not None)) is not None:
                dq, dk, dv = kernel.backward(*saved, call)
            dq, dk, dv = _widened(layout, dq, dk, dv)
            dq = _extended(dq, layout, 0.0)
        if blocks := layout.blocks(round_):
            call = call_of(blocks, pending is not None)
            inputs = (_rows(douts, blocks), _rows(queries, blocks))
            results = (_rows(outs, blocks), _rows(lses, blocks))
            block_dq, block_dk, block_dv = kernel.backward(*inputs, *_keys(held, blocks), *results, call)
        if pending is not None:
            pending.wait()
        held, sums = arriving, sums_arriving if round_ else _pack_dkv(dk, dv, rings)
        if blocks:
            # After the wait, because the dK,dV of the part that this round computes with arrive in this round.
            sizes = [block.keys for block in blocks]
            parts = (*_split(blocks, block_dq), block_dk.split(sizes), block_dv.split(sizes))
            for block, dq_part, dk_part, dv_part in zip(blocks, *parts, strict=True):
                dq[block.rows] += dq_part
                sums[block.ring][0, : len(dk_part)] += dk_part
                sums[block.ring][1, : len(dv_part)] += dv_part
    for ring, part in _results_of_mates(dq, rings):
        dq[ring.rows] += part
    for ring, home in zip(layout.rings, sums, strict=True):
        *of_earlier, own = home.split(ring.slices, dim=1)
        rings.prefixes.add(ring.shard.sequence, rings.layer, of_earlier)
        dk[ring.rows], dv[ring.rows] = own
        if ring.shard.later:
            later = rings.prefixes.take(ring.shard.sequence, rings.layer, len(ring.shard.earlier))
            if later is not None:
                dk[ring.rows] += later[0]
                dv[ring.rows] += later[1]
    return dq[: layout.tokens], dk, dv


def _widened(layout: Layout, *tensors: Tensor) -> tuple[Tensor, ...]:
    """With rings, cast to the wider dtype, because the results of later rounds are added to these tensors."""
    return tuple(x.to(wider(x.dtype)) for x in tensors) if layout.rings else tensors


def _extended(x: Tensor, layout: Layout, value: float) -> Tensor:
    """Append rows with `value` for the queries of mates: [T,...] to [R,...]."""
    more = layout.rows - len(x)
    return torch.cat((x, x.new_full((more, *x.shape[1:]), value))) if more else x


def _with_mates(rings: Rings, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Exchange the rows of ring shards with the members of their teams: tensors [T,...] to [R,...]."""
    layout, comm = rings.layout, rings.comm
    if comm is None or not layout.teams:
        return tensors
    found = tuple(_extended(x, layout, 0.0) for x in tensors)  # the mates' rows are received
    exchanges = [
        Exchange(x[ring.rows].contiguous(), mate.rank, extended[mate.rows], mate.rank)
        for x, extended in zip(tensors, found, strict=True)
        for ring in layout.rings
        for mate in ring.mates
    ]
    comm.post(exchanges).wait()
    return found


def _results_of_mates(x: Tensor, rings: Rings) -> list[tuple[RingShard, Tensor]]:
    """Send the rows of mates, of x [R,...], to them, and return what they computed for each ring's own rows."""
    layout, comm = rings.layout, rings.comm
    if comm is None or not layout.teams:
        return []
    found, exchanges = [], []
    for ring in layout.rings:
        for mate in ring.mates:
            part = torch.empty_like(x[ring.rows])
            exchanges.append(Exchange(x[mate.rows].contiguous(), mate.rank, part, mate.rank))
            found.append((ring, part))
    comm.post(exchanges).wait()
    return found


def _pack_kv(k: Tensor, v: Tensor, rings: Rings) -> list[Tensor]:
    """Copy the K,V of each ring's prefix and shard, S tokens, into one buffer [2,S,G,D], sent as one message.

    Returns one buffer per ring; none if there is no comm.
    """
    packed = _taken("kv", k, rings)
    for ring, buffer in zip(rings.layout.rings, packed, strict=True):
        for kept, target in zip(rings.prefix(ring), buffer.split(ring.slices, dim=1), strict=False):
            target.copy_(kept)
        torch.stack((k[ring.rows], v[ring.rows]), out=buffer[:, ring.prefix :])
    return packed


def _pack_dkv(dk: Tensor, dv: Tensor, rings: Rings) -> list[Tensor]:
    """Copy the dK,dV of each ring's shard, after zeros for its prefix, into one buffer as in `_pack_kv`."""
    packed = _taken("dkv", dk, rings)
    for ring, buffer in zip(rings.layout.rings, packed, strict=True):
        if ring.prefix:
            buffer[:, : ring.prefix] = 0
        torch.stack((dk[ring.rows], dv[ring.rows]), out=buffer[:, ring.prefix :])
    return packed


def _taken(kind: Kind, like: Tensor, rings: Rings) -> list[Tensor]:
    """Take the first buffer of each ring, for its own part; `like` is [T,G,D]. None if there is no comm."""
    layout, comm = rings.layout, rings.comm
    if comm is None:
        return []
    comm.buffers.fit(kind, layout, like)
    return [comm.buffers.take(kind, n, 0, ring.tokens_of(ring.shard.part)) for n, ring in enumerate(layout.rings)]


def _post(
    rings: Rings, round_: int, direction: Direction, held: list[Tensor], sums: list[Tensor]
) -> tuple[Pending | None, list[Tensor], list[Tensor]]:
    """Start a round's transfers, of the K,V in `held` and the dK,dV in `sums` (one tensor per ring).

    Returns the transfers (None if there are none), and the K,V and the dK,dV of the next round, which are valid once
    the transfers are complete.
    """
    comm = rings.comm
    if comm is None or not rings.layout.rings:
        return None, [], []
    exchanges, buffers = [], {"kv": list(held), "dkv": list(sums)}
    for number, ring in enumerate(rings.layout.rings):
        for kind, _, receive in ring.transfers(round_, direction):
            # Buffers alternate. Buffer 0 contains the rank's own K,V in round 0 and its own dK,dV in round 1.
            turn = round_ + 1 if kind == "kv" else round_
            incoming = comm.buffers.take(kind, number, turn, ring.tokens_of(receive))
            there, back = ring.rank(direction, 1), ring.rank(direction, -1)
            exchanges.append(Exchange(buffers[kind][number], there, incoming, back))
            buffers[kind][number] = incoming
    return comm.post(exchanges) if exchanges else None, buffers["kv"], buffers["dkv"]


def _rows(x: Tensor, blocks: Sequence[RingBlock]) -> Tensor:
    """Pack the query rows of all blocks, taken from x [T,...]."""
    return x[blocks[0].rows] if len(blocks) == 1 else torch.cat([x[block.rows] for block in blocks])


def _keys(held: Sequence[Tensor], blocks: Sequence[RingBlock]) -> tuple[Tensor, Tensor]:
    """Pack the keys and the values of all blocks: two tensors [tokens,G,D]. `held` has the K,V of each ring."""
    parts = [held[block.ring][:, : block.keys] for block in blocks]
    kv = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return kv[0], kv[1]


def _split(blocks: Sequence[RingBlock], *packed: Tensor) -> tuple[tuple[Tensor, ...], ...]:
    """Split each of the `packed` tensors, whose rows are those of `_rows`, into one part per block."""
    sizes = [block.rows.stop - block.rows.start for block in blocks]
    return tuple(x.split(sizes) for x in packed)
