"""Where shards lie in a rank's packed tokens, and what each ring does there round by round."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.kernels.call import Call
from engine.attention.layout import Layout, RingBlock, RingShard, ShardRows, call_of, layout
from engine.planner.plan.schedule import Transfer
from engine.planner.plan.step_plan import MicroBatch, Shard
from tests.attention.rings import unsplit


def micro(*shards: Shard) -> MicroBatch:
    return MicroBatch(index=0, rank=0, gang=0, slot=-1, shards=shards)


# An unsplit sequence, part 1 of a ring of 3 (2D = 6 chunks of 2, the first one longer), an empty part, and another one.
MIXED = micro(Shard(0, 5, (4,), 0), Shard(1, 13, (7, 4, 2), 1), Shard(2, 2, (1, 3, 5, 4), 3), Shard(3, 3, (4,), 0))


def test_shards_lie_one_after_the_other() -> None:
    found = layout(MIXED)
    assert found.tokens == 5 + 4 + 0 + 3
    assert found.bounds == (0, 5, 9, 12), "an empty shard has no bounds of its own: no kernel may see it"
    assert [(ring.offset, ring.tokens) for ring in found.rings] == [(5, 4), (9, 0)]
    assert found.shards == ((0, 5, 5, False), (5, 9, 13, True), (9, 9, 2, True), (9, 12, 3, False))


def test_only_shards_of_rings_are_listed_with_their_neighbours() -> None:
    middle, last = layout(MIXED).rings
    assert (middle.shard.length, middle.shard.degree, middle.shard.part) == (13, 3, 1)
    assert [middle.rank("forward", step) for step in (-1, 1)] == [7, 2]
    assert [last.rank("forward", step) for step in (-1, 1)] == [5, 1], "the ring closes"


def test_a_member_with_an_empty_shard_still_passes_messages_on() -> None:
    last = layout(MIXED).rings[1]
    assert [last.tokens_of(part) for part in range(4)] == [1, 1, 0, 0]
    assert last.transfers(0, "forward") == (Transfer("kv", send=3, receive=2),)
    assert last.transfers(2, "forward") == (Transfer("kv", send=1, receive=0),)
    found = layout(MIXED)
    assert all(block.ring == 0 for round_ in range(4) for block in found.blocks(round_))


def test_blocks_of_a_ring_follow_the_keys_that_it_holds() -> None:
    """Part 1 of 13 tokens on 3 ranks: chunks of 3 2 2 2 2 2 tokens, ours are chunks 1 and 4."""
    found = layout(micro(MIXED.shards[1]))
    assert found.blocks(0) == []
    assert found.blocks(1) == [RingBlock(0, slice(0, 4), (3,))], "part 0: its low chunk only"
    assert found.blocks(2) == [RingBlock(0, slice(2, 4), (4,))], "part 2: before our high chunk only"


def test_a_slice_attends_to_all_keys_of_earlier_slices() -> None:
    """Part 1 of 13 tokens on 3 ranks, after slices of 6 and 3 tokens, of which each part has 3."""
    found = layout(micro(Shard(0, 13, (7, 4, 2), 1, earlier=(6, 3), later=5)))
    (ring,) = found.rings
    assert (ring.prefix, ring.largest, ring.tokens_of(0)) == (3, 2 + 1 + 5, 3 + 5)
    assert found.shards == ((0, 4, 27, True),)
    assert found.blocks(0) == [RingBlock(0, slice(0, 4), (3,))]
    assert found.blocks(1) == [RingBlock(0, slice(0, 4), (3 + 3,))]
    assert found.blocks(2) == [RingBlock(0, slice(0, 2), (3,)), RingBlock(0, slice(2, 4), (3 + 4,))]


def test_in_a_team_a_rank_computes_for_its_mates_and_sends_further() -> None:
    """Part 1 of 4 in teams of 2, of 16 tokens: chunks of 2 tokens. Part 0 is its mate, K,V come from part 3."""
    found = layout(micro(Shard(0, 16, (7, 4, 2, 5), 1, team=2)))
    (ring,) = found.rings
    assert [(mate.part, mate.rank, mate.rows) for mate in ring.mates] == [(0, 7, slice(4, 8))] and found.rows == 8
    assert [ring.rank("forward", step) for step in (-1, 1)] == [5, 5]
    assert [ring.rank("counts", step) for step in (-1, 1)] == [7, 2]
    assert found.rounds("forward") == 2
    assert found.blocks(0) == [RingBlock(0, slice(6, 8), (4,))], "the mate's high chunk follows both of ours"
    assert found.blocks(1) == [RingBlock(0, slice(2, 4), (4,)), RingBlock(0, slice(6, 8), (4,))]


def test_a_call_of_several_rounds_packs_the_keys_of_each_query_once() -> None:
    """Part 1 of 16 tokens on 4 ranks: chunks of 2 tokens. Rounds 1 and 2 have the K,V of parts 0 and 3."""
    found = layout(micro(Shard(0, 16, (7, 4, 2, 5), 1)), rounds_per_call=4)
    assert [list(found.rounds_of(call)) for call in range(4)] == [[0], [1, 2], [3], []]
    assert (found.calls("forward"), found.calls("backward")) == (3, 4)
    assert found.blocks(0) == []
    low, high = RingBlock(0, slice(0, 2), (2, 0)), RingBlock(0, slice(2, 4), (2, 4))
    assert found.blocks(1) == [low, high]
    assert call_of(found.blocks(1)) == Call((0, 2, 4), (0, 2, 8), causal=False)
    assert found.blocks(2) == [RingBlock(0, slice(2, 4), (4,))]


def test_a_round_is_one_call_over_the_blocks_of_all_rings() -> None:
    found = layout(MIXED)
    assert found.causal_call() == Call((0, 5, 9, 12), (0, 5, 9, 12), causal=True)
    assert found.blocks(1) == [RingBlock(0, slice(5, 9), (3,))], "the other ring's blocks are empty"
    assert call_of(found.blocks(1)) == Call((0, 4), (0, 3), causal=False)
    assert call_of(found.blocks(2), overlapped=True) == Call((0, 2), (0, 4), causal=False, overlapped=True)
    assert found.blocks(3) == []
    two = layout(micro(Shard(0, 13, (7, 4, 2), 1), Shard(1, 8, (4, 5), 0)))
    assert two.blocks(1) == [RingBlock(0, slice(0, 4), (3,)), RingBlock(1, slice(6, 8), (4,))]
    assert call_of(two.blocks(1)) == Call((0, 4, 6), (0, 3, 7), causal=False)


def test_many_rings_take_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    count, asked, rounds = 50, list[RingShard](), RingShard.rounds
    monkeypatch.setattr(RingShard, "rounds", lambda ring, *of: asked.append(ring) or rounds(ring, *of))
    many = layout(micro(*(Shard(number, 24, (4, 7, 2), 0) for number in range(count))))
    assert len(many.blocks(1)) >= count and len(asked) <= 3 * count


def test_all_rings_advance_together_as_far_as_the_largest() -> None:
    found = layout(MIXED)
    assert (found.rounds("forward"), found.rounds("backward")) == (4, 5)
    assert (found.calls("forward"), found.calls("backward")) == (4, 5)


@pytest.mark.parametrize("tokens", [1, 7])
def test_an_unsplit_sequence_needs_one_round_and_no_ring(tokens: int) -> None:
    rows = (ShardRows(0, tokens, tokens, ring=False),)
    assert unsplit(tokens) == layout(micro(Shard(0, tokens, (3,), 0))) == Layout(tokens, (0, tokens), (), rows)
    assert (unsplit(tokens).rounds("forward"), unsplit(tokens).rounds("backward")) == (1, 1)


def test_no_token_has_no_bounds_that_a_kernel_would_see() -> None:
    assert unsplit(0) == layout(micro()) == Layout(0, (0,), (), ())


@given(st.data())
def test_bounds_are_those_of_the_shards_that_hold_tokens(data: st.DataObject) -> None:
    shards = []
    for number in range(data.draw(st.integers(0, 6))):
        degree = data.draw(st.integers(1, 5))
        part = data.draw(st.integers(0, degree - 1))
        shards.append(Shard(number, data.draw(st.integers(1, 12)), tuple(range(degree)), part))
    found = layout(micro(*shards))
    assert found.bounds[0] == 0 and found.bounds[-1] == found.tokens
    assert all(start < stop for start, stop in zip(found.bounds, found.bounds[1:], strict=False))
    assert {ring.offset for ring in found.rings} <= set(found.bounds)
    assert len(found.rings) == sum(shard.degree > 1 for shard in shards)
