from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.planner.make import plan_step
from engine.planner.plan import loads, schedule
from engine.planner.plan.emit import emit
from engine.planner.planners import PLANNERS
from tests.planner.samples import RATES, ints, lengths, settings


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
