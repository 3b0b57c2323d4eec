from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from engine.planner.make import plan_step
from engine.planner.plan import loads, schedule
from engine.planner.plan.emit import emit
from engine.planner.planners import PLANNERS
from tests.planner.samples import COSTS, RATES, ints, lengths, settings, staged_costs


@given(st.sampled_from(sorted(PLANNERS)), st.integers(1, 9), st.sampled_from([0.0, 0.5]), st.data())
def test_tokens_and_pairs_are_those_of_the_schedule(
    planner: str, ranks: int, windowed: float, data: st.DataObject
) -> None:
    rates = RATES._replace(windowed=windowed, window=5.0)
    plan = plan_step(ints(*data.draw(lengths(ranks * 16))), settings(planner, ranks))
    tokens, pairs = loads.shard_tokens(plan).tolist(), loads.shard_pairs(plan, rates).tolist()
    for index in range(plan.micro_batches):
        for shard in plan.micro_batch(index).shards:
            at = int(plan.ring_start[shard.sequence]) + shard.part
            spans = schedule.shard_spans(shard.length, shard.degree, shard.part)
            assert tokens[at] == sum(span.tokens for span in spans)
            keys = [position + 1 for span in spans for position in range(*span)]
            within = sum(min(5, own) for own in keys)
            assert pairs[at] == (1 - windowed) * sum(keys) + windowed * within
    assert loads.micro_tokens(plan).sum() == plan.lengths.sum()


@given(st.lists(st.integers(1, 3_000_000), min_size=1, max_size=8), st.integers(1, 6))
def test_splitting_a_sequence_changes_neither_its_pairs_nor_its_tokens(step: list[int], ranks: int) -> None:
    plan = emit("by hand", "free", ranks, 10**9, ints(*step), [[(s, range(ranks))] for s in range(len(step))])
    tokens, pairs = loads.shard_tokens(plan), loads.shard_pairs(plan, RATES)
    assert pairs.sum() == sum(s * (s + 1) // 2 for s in step)
    assert tokens.sum() == sum(step)


def test_unsplit_sequences_are_those_on_one_rank() -> None:
    plan = emit("by hand", "free", 3, 16, ints(12, 4, 8), [[(0, (0, 1, 2)), (1, (2,)), (2, (0,))]])
    assert loads.unsplit_share(plan) == 0.5
    whole = emit("by hand", "free", 1, 16, ints(7), [[(0, (0,))]])
    assert loads.unsplit_share(whole) == 1.0


def test_ring_buffers_are_as_large_as_the_largest_shard() -> None:
    """A ring of three over 7 tokens: the last member has 2 tokens, and receives 3."""
    plan = emit("by hand", "free", 3, 16, ints(7, 4), [[(0, (0, 1, 2)), (1, (2,))]])
    tokens, buffers = loads.micro_loads(plan)
    assert (tokens.tolist(), buffers.tolist()) == ([3, 2, 6], [3, 3, 3])
    alone = emit("by hand", "free", 1, 16, ints(7), [[(0, (0,))]])
    assert [part.tolist() for part in loads.micro_loads(alone)] == [[7], [0]]


def test_buffers_of_teams_count_once_for_each_member() -> None:
    """Blocks of a layer have copies of the keys, and their gradients."""
    whole = emit("by hand", "free", 4, 16, ints(8), [[(0, (0, 1, 2, 3))]])
    assert loads.micro_loads(replace(whole, team=ints(2)))[1].tolist() == [2 * 2] * 4
    slices = emit("by hand", "free", 2, 16, ints(8, 6), [[(0, (0, 1))], [(1, (0, 1))]])
    assert loads.micro_loads(replace(slices, before=ints(0, 8)))[1].tolist() == [4, 7] * 2


def test_buffers_of_a_pipeline_are_for_the_largest_call_of_a_ring() -> None:
    """A call may have four rounds. Rings of 2, 3, 6 and 7 have calls of 1, 2, 3 and 4 rounds at most."""
    for degree, rounds in ((2, 1), (3, 2), (4, 2), (5, 2), (6, 3), (7, 4), (8, 4)):
        plan = emit("by hand", "pipeline", degree, 64, ints(8 * degree), [[(0, tuple(range(degree)))]], stages=2)
        assert loads.micro_loads(plan)[1].tolist() == [8 * rounds // 4] * degree
    slices = emit("by hand", "pipeline", 1, 64, ints(8, 6), [[(0, (0,))], [(1, (0,))]], stages=2)
    assert loads.micro_loads(replace(slices, before=ints(0, 8)))[1].tolist() == [2, 4]


def test_peers_are_neighbours_in_any_ring() -> None:
    plan = emit("by hand", "free", 5, 16, ints(9, 9, 2), [[(0, (0, 1, 2))], [(1, (1, 3))], [(2, (4,))]])
    assert loads.peers(plan).tolist() == [2, 3, 2, 1, 0]


def test_gradients_of_slices_last_from_the_last_slice_to_their_own() -> None:
    """One rank with slices of 8, 6 and 4 tokens and a sequence of 5; both stages run F0 F1 F2 F3 B2 B3 B1 B0.

    K,V of a token count as one token of activations, their gradients as two.
    """
    plan = emit("by hand", "pipeline", 1, 64, ints(8, 6, 4, 5), [[(s, (0,))] for s in range(4)], stages=2)
    order = [
        (micro, stage, forward)
        for forward, micros in ((1, (0, 1, 2, 3)), (0, (2, 3, 1, 0)))
        for micro in micros
        for stage in ((0, 1) if forward else (1, 0))
    ]
    passes = ints(*(4 * micro + 2 * stage + (1 - forward) for micro, stage, forward in order))
    plan = replace(plan, before=ints(0, 8, 14, 0), passes=passes)
    costs = staged_costs(2, replace(COSTS, slice_kv_bytes=100, slice_dkv_bytes=200))
    added, removed = loads.gradient_tokens(plan, costs)
    assert added[0].tolist() == [0, 0, 2 * (8 + 6), 0]
    assert removed[0].tolist() == [2 * 8, 2 * 6, 0, 0]
    # At B2 the other activations, all K,V and all gradients; at B3 without slice 2; at B1 without 3; at B0 its own.
    kv, gradients = 8 + 6, 2 * (8 + 6)
    expected = {2: 8 + 6 + 5 + kv + gradients, 3: 8 + 6 + kv + gradients, 1: 8 + kv + gradients, 0: 8 + 2 * 8}
    found = loads.in_flight(plan, costs).tokens
    assert [row.tolist() for row in found] == [[expected[micro] for micro in range(4)]] * 2
