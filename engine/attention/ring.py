"""Ring attention: executes the ring schedule of a micro-batch, as one autograd Function per layer.

Round 0 is one packed causal call over all shards of the rank: unsplit sequences and ring shards. Then all rings advance
together, call by call; in a pipeline a call has several rounds (schedule.py). While a call computes its blocks, the K,V
of the next one are being transferred. The result of each block is merged into the output of the earlier calls.

```
 call        0               1               2            on rank r of a ring, one round a call
 compute     own shard       keys of r-1     keys of r-2
 receive     K,V of r-1      K,V of r-2      ...          from rank r-1
```
A slice of a sequence also attends to the earlier slices, whose K,V are in `Prefixes` and travel with its own. In a team
the ranks first exchange their queries, compute with those of the whole team, and exchange the results at the end.

Letters: T tokens of this rank in the micro-batch, R rows of queries: own ones and those of mates, the other members
of teams (layout.py), H query heads, G key and value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.attention.comm import Comm, Exchange
from engine.attention.kernels.call import Kernel
from engine.attention.layout import Layout, RingBlock, RingShard, call_of
from engine.attention.prefix import Prefixes
from engine.dtypes import wider
from engine.planner.plan.schedule import Direction, Kind


class Rings(NamedTuple):
    """The inputs of the rings of a micro-batch in one layer."""

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
    # In training the backward passes free the K,V of slices. Without one they are dropped after the last slice.
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
    # Slices that come later attend to these K,V, so they stay on this rank until the slice's backward pass.
    for ring in layout.rings:
        if ring.shard.later:
            before = len(ring.shard.earlier)
            rings.prefixes.put(ring.shard.sequence, rings.layer, before, k[ring.rows], v[ring.rows])
    moving = _Moving.of(_pack_kv(k, v, rings))
    (queries,) = _with_mates(rings, q)
    # If T is 0 there is no causal call, and the results stay empty.
    out, lse = torch.empty_like(q[:0]), q.new_empty((0, q.shape[1]), dtype=wider(q.dtype))
    stream = _stream_of(rings, k.device)
    for number in range(layout.calls("forward")):
        transfers = _Transfers(_hops(rings, number, "forward", moving), stream)
        if number == 0:
            # The causal call needs no keys of other ranks, so it hides the first transfers. Without rings its results
            # stay in the kernel's dtype, and nothing is copied.
            if (call := layout.causal_call(transfers.running)) is not None:
                out, lse = kernel.forward(q, k, v, call)
            out, lse = _widened(layout, out, lse)
            out, lse = _extended(out, layout, 0.0), _extended(lse, layout, -torch.inf)
        # The kernel normalises over the keys of this call alone. `merge` weights the results by their log-sum-exp, so
        # that they become those over all keys so far.
        if blocks := layout.blocks(number):
            call, keys = call_of(blocks, transfers.running), _keys(moving, blocks, layout.rounds_of(number))
            part_out, part_lse = kernel.forward(_rows(queries, blocks), *keys, call)
            for block, o, part in zip(blocks, *_split(blocks, part_out, part_lse), strict=True):
                kernel.merge(out[block.rows], lse[block.rows], o, part)
        transfers.finish()
    # Each mate has attended to other keys with this rank's queries: these partial results are merged like those of a
    # call.
    if layout.teams:
        for ring, part in _results_of_mates(torch.cat((out, lse[..., None]), dim=-1), rings):
            kernel.merge(out[ring.rows], lse[ring.rows], part[..., :-1], part[..., -1])
    return out[: layout.tokens], lse[: layout.tokens]


def _backward(saved: _Saved, rings: Rings) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dq [T,H,D], dk and dv [T,G,D].

    With rings they are in the wider dtype, also while dK,dV are transferred: in bf16 their error would grow with the
    degree of the ring. The dK,dV of a part follow its K,V around the ring, one call later, and each rank adds its
    contribution. In the last call they return to the rank that owns the part, where those of earlier slices wait for
    the backward passes of these.
    """
    layout, kernel = rings.layout, rings.kernel
    dout, q, k, v, out, lse = saved
    moving = _Moving.of(_pack_kv(k, v, rings))
    # Mates compute gradients for this rank's queries, so they need all that a kernel reads for each query.
    douts, queries, outs, lses = _with_mates(rings, dout, q, out, lse)
    # If T is 0 there is no causal call, and the gradients stay empty.
    dq, dk, dv = _widened(layout, *(torch.empty_like(x[:0]) for x in (q, k, v)))
    stream = _stream_of(rings, k.device)
    for number in range(layout.calls("backward")):
        transfers = _Transfers(_hops(rings, number, "backward", moving), stream)
        if number == 0:
            # As in the forward pass, the causal call hides the first transfers. Its dK,dV are the first summands of the
            # rank's own part.
            if (call := layout.causal_call(transfers.running)) is not None:
                dq, dk, dv = kernel.backward(*saved, call)
            dq, dk, dv = _widened(layout, dq, dk, dv)
            dq = _extended(dq, layout, 0.0)
            moving.sums.extend(_pack_dkv(dk, dv, rings))
        if blocks := layout.blocks(number):
            call, keys = call_of(blocks, transfers.running), _keys(moving, blocks, layout.rounds_of(number))
            # Kernels get the merged `out` and `lse`, so the gradients of a block need no correction: they are added up.
            inputs = (_rows(douts, blocks), _rows(queries, blocks))
            results = (_rows(outs, blocks), _rows(lses, blocks))
            block_dq, block_dk, block_dv = kernel.backward(*inputs, *keys, *results, call)
        transfers.finish()
        if number > 0:  # not before: on a GPU, another stream may still read them
            moving.drop(layout.rounds_of(number - 1))
        if blocks:
            for block, dq_part in zip(blocks, *_split(blocks, block_dq), strict=True):
                dq[block.rows] += dq_part
            moving.put(blocks, layout.rounds_of(number), block_dk, block_dv)
    # What no hop has added: rings of one rank, or of one team, make none.
    moving.add(range(layout.rounds("forward")))
    for ring, part in _results_of_mates(dq, rings):
        dq[ring.rows] += part
    # Each sum has returned to the rank that owns its part. Gradients of earlier slices wait in `prefixes`. The part for
    # the ring's own shard is complete only if no later slice attends to it; otherwise `take` returns the gradients that
    # the later slices added in their backward passes, which ran first.
    for ring, home in zip(layout.rings, moving.sums, strict=True):
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
    """With rings, cast to the wider dtype, because the results of later calls are added to these tensors."""
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
    """Send the mates' rows of x [R,...] to them, and return their results for each ring's own rows."""
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

    Returns one buffer per ring; an empty list if there is no comm.
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
    """Take the first buffer of each ring, for its own part; `like` is [T,G,D]. Empty without a comm."""
    layout, comm = rings.layout, rings.comm
    if comm is None:
        return []
    comm.buffers.fit(kind, layout, like)
    return [comm.buffers.take(kind, n, 0, ring.tokens_of(ring.shard.part)) for n, ring in enumerate(layout.rings)]


class _Moving(NamedTuple):
    """The tensors that move around the rings of a micro-batch and are on this rank: one item per ring in each list."""

    kv: list[dict[int, Tensor]]  # by round: K,V [2,S,G,D] of the part with which the rank computes
    sums: list[Tensor]  # dK,dV [2,S,G,D] of one part, summed over the ranks where they have been
    parts: list[dict[int, list[tuple[Tensor, Tensor]]]]  # by round: dK and dV of first keys, to be added to `sums`

    @classmethod
    def of(cls, own: list[Tensor]) -> _Moving:
        """Begin with the K,V of each ring's own part."""
        return cls([{0: kv} for kv in own], [], [{} for _ in own])

    def put(self, blocks: Sequence[RingBlock], rounds: range, dk: Tensor, dv: Tensor) -> None:
        """Keep the gradients of the keys of all blocks of a call, which are in the order of `_keys`."""
        sizes = [size for block in blocks for size in block.keys]
        rows = zip(dk.split(sizes), dv.split(sizes), strict=True)
        for block in blocks:
            for round_, _, part in zip(rounds, block.keys, rows, strict=False):
                self.parts[block.ring].setdefault(round_, []).append(part)

    def add(self, rounds: Iterable[int]) -> None:
        """Add the results of these rounds to the dK,dV of their parts."""
        for total, parts in zip(self.sums, self.parts, strict=True):
            for round_ in rounds:
                for dk, dv in parts.get(round_, ()):
                    total[0, : len(dk)] += dk
                    total[1, : len(dv)] += dv

    def drop(self, rounds: range) -> None:
        """Free the results that were added."""
        for parts in self.parts:
            for round_ in rounds:
                parts.pop(round_, None)


class _Transfers:
    """The hops that run during a call (`_hops`).

    Each hop sends what the one before it received. On a GPU they have a separate stream, so that neither the host nor
    the call waits between them. Elsewhere the first one runs during the call, and the others after it.
    """

    def __init__(self, hops: Iterator[None], stream: torch.cuda.Stream | None) -> None:
        self._hops, self._stream = hops, stream
        if stream is None:
            self.running = next(hops, False) is None
            return
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            self.running = len(list(hops)) > 0

    def finish(self) -> None:
        """Wait for all hops; on a GPU the current stream waits."""
        for _ in self._hops:
            pass
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


def _stream_of(rings: Rings, device: torch.device) -> torch.cuda.Stream | None:
    """Return the stream for the transfers of rings on a device; None on CPUs and without rings."""
    return _stream(device) if device.type == "cuda" and rings.layout.rings else None


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    # High priority, as NCCL's (parallel/groups.py): else the additions between hops wait for the call's kernel.
    return torch.cuda.Stream(device, priority=-1)


def _hops(rings: Rings, number: int, direction: Direction, moving: _Moving) -> Iterator[None]:
    """Make the hops that run during call `number`, one by one, and update `moving`. Yields when a hop has started.

    Hop i moves the K,V for round i of the next call, and the dK,dV of round i of the call before.
    """
    layout, comm = rings.layout, rings.comm
    if comm is None:
        return
    leaving = layout.rounds_of(number - 1) if direction == "backward" and number > 0 else range(0)
    for arrives, leaves in zip_longest(layout.rounds_of(number + 1), leaving):
        exchanges = []
        if leaves is not None:
            moving.add((leaves,))
        for at, ring in enumerate(layout.rings):
            there, back = ring.rank(direction, 1), ring.rank(direction, -1)
            # K,V arrive in the round before the one that needs them, and dK,dV leave in the one after their own.
            # Buffers take turns. The first contains the rank's own K,V in round 0, and its own dK,dV in round 1.
            if arrives is not None and (hop := ring.transfer("kv", arrives - 1, direction)):
                incoming = comm.buffers.take("kv", at, arrives, ring.tokens_of(hop.receive))
                exchanges.append(Exchange(moving.kv[at][arrives - 1], there, incoming, back))
                moving.kv[at][arrives] = incoming
            if leaves is not None and (hop := ring.transfer("dkv", leaves + 1, direction)):
                incoming = comm.buffers.take("dkv", at, leaves + 1, ring.tokens_of(hop.receive))
                exchanges.append(Exchange(moving.sums[at], there, incoming, back))
                moving.sums[at] = incoming
        if exchanges:
            pending = comm.post(exchanges)
            yield
            pending.wait()


def _rows(x: Tensor, blocks: Sequence[RingBlock]) -> Tensor:
    """Pack the query rows of all blocks, taken from x [T,...]."""
    return x[blocks[0].rows] if len(blocks) == 1 else torch.cat([x[block.rows] for block in blocks])


def _keys(moving: _Moving, blocks: Sequence[RingBlock], rounds: range) -> tuple[Tensor, Tensor]:
    """Pack the keys and the values of all blocks of a call with these rounds: two tensors [tokens,G,D]."""
    parts = [
        moving.kv[block.ring][round_][:, :size]
        for block in blocks
        for round_, size in zip(rounds, block.keys, strict=False)
    ]
    kv = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return kv[0], kv[1]


def _split(blocks: Sequence[RingBlock], *packed: Tensor) -> tuple[tuple[Tensor, ...], ...]:
    """Split each of the `packed` tensors, whose rows are those of `_rows`, into one part per block."""
    sizes = [block.rows.stop - block.rows.start for block in blocks]
    return tuple(x.split(sizes) for x in packed)
