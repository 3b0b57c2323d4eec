"""Ring attention: executes the ring schedule of a micro-batch, as one autograd Function per layer.

Round 0 is one packed causal call over all shards of the rank: unsplit sequences and ring shards. Then all rings advance
together, round by round. While a round computes its blocks, the K,V of the next round are being transferred. The
result of each block is merged into the output of the earlier rounds.

```
 round       0               1               2            on rank r of a ring
 compute     own shard       keys of r-1     keys of r-2
 receive     K,V of r-1      K,V of r-2      ...          from rank r-1
```

Letters: T tokens of this rank in the micro-batch, H query heads, G key and value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.attention.comm import Comm, Exchange, Pending
from engine.attention.kernels.call import Kernel
from engine.attention.layout import Layout, RingBlock
from engine.dtypes import wider
from engine.planner.plan.schedule import Direction, Kind


def attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout, comm: Comm | None, kernel: Kernel) -> Tensor:
    """Compute causal attention within each sequence of a micro-batch. Returns [T,H,D] in the dtype of `q`.

    q is [T,H,D], k and v are [T,G,D]. `comm` may be None for a layout without rings. All ranks of a ring must call this
    for the same layers in the same order, forward and backward. Raises ValueError if `q` has another number of tokens
    than `layout`, or if `layout` has rings and `comm` is None.
    """
    if len(q) != layout.tokens:
        raise ValueError(f"{len(q)} tokens for a layout of {layout.tokens}")
    if layout.rings and comm is None:
        raise ValueError("a layout with rings needs a comm")
    return _RingAttention.apply(q, k, v, layout, comm, kernel)  # type: ignore[no-any-return]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: Layout, comm: Comm | None, kernel: Kernel) -> Tensor:
        # A separate function, so that the tensors of the rounds are freed before the results are cast.
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
    """The inputs of the backward pass. For each block, kernels need the merged `out` and `lse` over all keys."""

    dout: Tensor  # [T,H,D]
    q: Tensor  # [T,H,D]
    k: Tensor  # [T,G,D]
    v: Tensor  # [T,G,D]
    out: Tensor  # [T,H,D]
    lse: Tensor  # [T,H]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, comm: Comm | None, kernel: Kernel
) -> tuple[Tensor, Tensor]:
    """Compute the output [T,H,D] and log-sum-exp [T,H]: in the wider dtype with rings, else in the kernel's."""
    held = _pack("kv", k, v, layout, comm)
    out, lse = torch.empty_like(q[:0]), q.new_empty((0, q.shape[1]), dtype=wider(q.dtype))  # if T is 0
    for round_ in range(layout.rounds("forward")):
        pending, arriving, _ = _post(layout, round_, "forward", comm, held, [])
        call = layout.call(round_, overlapped=pending is not None)
        if call is not None and round_ == 0:
            out, lse = _widened(layout, *kernel.forward(q, k, v, call))
        elif call is not None:
            blocks = layout.blocks(round_)
            part_out, part_lse = kernel.forward(_rows(q, blocks), *_keys(held, blocks), call)
            for block, o, part in zip(blocks, *_split(blocks, part_out, part_lse), strict=True):
                kernel.merge(out[block.rows], lse[block.rows], o, part)
        if pending is not None:
            pending.wait()
        held = arriving
    return out, lse


def _backward(saved: _Saved, layout: Layout, comm: Comm | None, kernel: Kernel) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dq [T,H,D], dk and dv [T,G,D].

    With rings they are in the wider dtype, also while dK,dV are transferred: in bf16 their error would grow with the
    degree of the ring. The dK,dV of a shard follow its K,V around the ring, one round later, and each rank adds its
    contribution. In the last round they return to the rank that owns the shard.
    """
    dout, q, k, v, out, lse = saved
    held, sums = _pack("kv", k, v, layout, comm), list[Tensor]()
    dq, dk, dv = _widened(layout, *(torch.empty_like(x[:0]) for x in (q, k, v)))  # if T is 0
    for round_ in range(layout.rounds("backward")):
        pending, arriving, sums_arriving = _post(layout, round_, "backward", comm, held, sums)
        blocks = layout.blocks(round_) if round_ else []
        call = layout.call(round_, overlapped=pending is not None)
        if call is not None and round_ == 0:
            dq, dk, dv = _widened(layout, *kernel.backward(*saved, call))
        elif call is not None:
            queries = (_rows(dout, blocks), _rows(q, blocks))
            results = (_rows(out, blocks), _rows(lse, blocks))
            block_dq, block_dk, block_dv = kernel.backward(*queries, *_keys(held, blocks), *results, call)
        if pending is not None:
            pending.wait()
        held, sums = arriving, sums_arriving if round_ else _pack("dkv", dk, dv, layout, comm)
        if blocks:
            # After the wait, because the dK,dV of the shard that this round computes with arrive in this round.
            sizes = [block.keys for block in blocks]
            parts = (*_split(blocks, block_dq), block_dk.split(sizes), block_dv.split(sizes))
            for block, dq_part, dk_part, dv_part in zip(blocks, *parts, strict=True):
                dq[block.rows] += dq_part
                sums[block.ring][0, : len(dk_part)] += dk_part
                sums[block.ring][1, : len(dv_part)] += dv_part
    for ring, home in zip(layout.rings, sums, strict=True):
        dk[ring.rows], dv[ring.rows] = home
    return dq, dk, dv


def _widened(layout: Layout, *tensors: Tensor) -> tuple[Tensor, ...]:
    """With rings, cast to the wider dtype, because the results of later rounds are added to these tensors."""
    return tuple(x.to(wider(x.dtype)) for x in tensors) if layout.rings else tensors


def _pack(kind: Kind, k: Tensor, v: Tensor, layout: Layout, comm: Comm | None) -> list[Tensor]:
    """Copy k and v (or dk and dv) of each ring shard of S tokens into one buffer [2,S,G,D], sent as one message.

    Returns one buffer per ring; none if `comm` is None.
    """
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
    """Start a round's transfers, of the K,V in `held` and the dK,dV in `sums` (one tensor per ring).

    Returns the transfers (None if there are none), and the K,V and the dK,dV of the next round, which are valid once
    the transfers are complete.
    """
    if comm is None or not layout.rings:
        return None, [], []
    exchanges, buffers = [], {"kv": list(held), "dkv": list(sums)}
    for number, ring in enumerate(layout.rings):
        for kind, _, receive in ring.transfers(round_, direction):
            # Buffers alternate. Buffer 0 contains the rank's own K,V in round 0 and its own dK,dV in round 1.
            turn = round_ + 1 if kind == "kv" else round_
            incoming = comm.buffers.take(kind, number, turn, ring.tokens_of(receive))
            exchanges.append(Exchange(buffers[kind][number], ring.next_rank, incoming, ring.previous_rank))
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
