"""A ring's buffers: the same ones in each round and layer, and no more than one layout's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.buffers import Buffers
from engine.attention.kernels.choice import choose
from engine.attention.layout import Layout, layout
from engine.attention.ring import attend
from engine.planner.plan.schedule import shard_tokens
from engine.planner.plan.step_plan import MicroBatch, Shard
from tests.attention.rings import CPU, Case, Placed, ThreadComm, links_between, unsplit

LIKE = torch.empty(0, 3, 5)  # G, D


def rings(*shards: Shard) -> Layout:
    return layout(MicroBatch(index=0, rank=0, gang=0, slot=-1, shards=shards))


@given(st.integers(1, 60), st.integers(2, 7), st.data())
def test_any_part_of_a_ring_fits(length: int, degree: int, data: st.DataObject) -> None:
    part = data.draw(st.integers(0, degree - 1))
    one, buffers = rings(Shard(0, length, tuple(range(degree)), part)), Buffers()
    buffers.fit("kv", one, LIKE)
    for other in range(degree):
        tokens = one.rings[0].tokens_of(other)
        room = buffers.take("kv", 0, other, tokens)
        assert room.shape == (2, tokens, 3, 5) and room.is_contiguous()


@given(st.lists(st.integers(1, 30), min_size=2, max_size=7), st.integers(1, 6), st.data())
def test_any_part_of_a_ring_fits_with_its_prefix(lengths: list[int], degree: int, data: st.DataObject) -> None:
    *earlier, length = lengths
    part = data.draw(st.integers(0, degree - 1))
    one, buffers = rings(Shard(0, length, tuple(range(degree)), part, tuple(earlier))), Buffers()
    buffers.fit("kv", one, LIKE)
    for other in range(degree):
        tokens = sum(shard_tokens(size, degree, other) for size in lengths)
        assert one.rings[0].tokens_of(other) == tokens
        assert buffers.take("kv", 0, other, tokens).shape == (2, tokens, 3, 5)


def test_turns_alternate_between_two_buffers() -> None:
    buffers = Buffers()
    buffers.fit("kv", rings(Shard(0, 8, (0, 1), 0), Shard(1, 8, (0, 1), 0)), LIKE)
    first, second, third = (buffers.take("kv", 0, turn, 4).data_ptr() for turn in range(3))
    assert first == third != second
    assert len({buffers.take("kv", ring, turn, 4).data_ptr() for ring in range(2) for turn in range(2)}) == 4


def test_a_call_has_two_buffers_for_each_of_its_rounds_of_keys() -> None:
    """Those of its own rounds, and those of the next call, which arrive meanwhile; as many as rounds are enough."""
    micro = MicroBatch(
        0, 0, 0, -1, (Shard(0, 90, tuple(range(9)), 0), Shard(1, 8, (0, 1), 0), Shard(2, 5, (0,), 0, (3,)))
    )
    buffers, one = Buffers(), layout(micro, rounds_per_call=4)
    buffers.fit("kv", one, LIKE)
    buffers.fit("dkv", one, LIKE)
    for kind, counts in (("kv", [8, 2, 1]), ("dkv", [2, 2, 1])):
        assert [len(of_ring) for of_ring in buffers._buffers[kind]] == counts


def test_the_same_layout_keeps_them_and_another_takes_their_place() -> None:
    one, other, buffers = rings(Shard(0, 8, (0, 1), 0)), rings(Shard(0, 80, (0, 1), 0)), Buffers()
    buffers.fit("kv", one, LIKE)
    buffers.fit("dkv", one, LIKE.double())
    buffers.take("kv", 0, 0, 4).fill_(7)
    buffers.fit("kv", one, LIKE)
    assert (buffers.take("kv", 0, 0, 4) == 7).all()
    buffers.fit("kv", other, LIKE)
    assert held(buffers) == 2 * 2 * 40 * 15, "neither the former K,V nor their gradients are held any longer"
    buffers.fit("kv", unsplit(9), LIKE)
    assert held(buffers) == 0


def held(buffers: Buffers) -> int:
    """Return the elements of all buffers."""
    return sum(flat.numel() for rings in buffers._buffers.values() for ring in rings for flat in ring)


def test_layers_and_passes_share_what_the_memory_model_counts() -> None:
    """Two K,V buffers in the model's dtype and two dK,dV ones in fp32, of the largest shard: and they do not move."""
    one = Case((Placed(13, (0, 1, 2)),), 3, heads=4, groups=2, dtype=torch.bfloat16)
    links = links_between(3)
    comms = [ThreadComm(rank, links) for rank in range(3)]
    kernel = choose(CPU, one.dtype, one.head_dim)

    def run(rank: int) -> tuple[int, int]:
        q, k, v, dout = (x[one.rows(rank)] for x in one.inputs())
        q.requires_grad_()
        for _ in range(3):  # layers: the output of one is the next one's queries
            q = attend(q, k, v, layout(one.micro_batch(rank)), comms[rank], kernel)
        q.backward(dout)
        return held(comms[rank].buffers), len(
            {id(flat) for ring in comms[rank].buffers._buffers["kv"] for flat in ring}
        )

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(run, range(3)))
    largest, elements = 5, 2 * one.groups * one.head_dim
    assert results == [(2 * largest * elements * 2, 2)] * 3
    for comm in comms:
        kinds = {kind: {flat.dtype for ring in of for flat in ring} for kind, of in comm.buffers._buffers.items()}
        assert kinds == {"kv": {torch.bfloat16}, "dkv": {torch.float32}}
