"""Compiled times of a sequence on its ring, compared with a plain walk over the schedule's rounds and transfers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cost import flops
from engine.cost.times import (
    QUERIES_B,
    QUERIES_F,
    Rates,
    backward_ring,
    calls,
    exchange,
    forward_ring,
    hide,
    in_team,
    pairs,
    shared,
    together,
    unsplit,
    unsplit_times,
)
from engine.planner.plan import schedule

SOME = st.floats(0.0, 1e3, allow_subnormal=False)
RATES = st.builds(
    Rates,
    *[SOME] * 12,
    inter_node_slowdown=st.floats(1.0, 50.0),
    overlap=st.one_of(st.just(0.0), st.just(1.0), st.floats(0.0, 1.0)),
    recompute_factor=st.sampled_from([0.0, 1.0]),
    copy=SOME,
    query=SOME,
    result=SOME,
    team=st.just(1),
    rounds_per_call=st.sampled_from([1, 2, 4, 8]),
    window=st.integers(1, 10**6).map(float),
    windowed=st.sampled_from([0.0, 0.5, 5 / 6, 1.0]),
)
DEGREES = st.integers(1, 9)
EXACT = 1e-9
FAST = Rates(3.0, 7.0, 0.5, 1.25, 100.0, 5.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 8.0, 1.0, 0.0, 0.0)  # links cost nothing


def slow_pairs(rates: Rates, tokens: int, before: int = 0) -> float:
    """Pairs on average over the layers, query by query for short sequences."""
    queries = range(before, before + tokens)
    if tokens < 100:
        every, within = sum(at + 1 for at in queries), sum(min(at + 1, rates.window) for at in queries)
    else:
        ends = (before + tokens, before)
        every, within = (
            np.subtract(*(flops.pairs(end, most) for end in ends)) for most in (flops.WHOLE, int(rates.window))
        )
    return float((1 - rates.windowed) * every + rates.windowed * within)


def walk(
    rates: Rates,
    degree: int,
    part: int,
    direction: schedule.Direction,
    work: Callable[[int], float],
    far: float,
    t: float,
) -> float:
    """Return the time of a pass: in each round the longer of compute and transfers, and the unhidden other.

    In a backward pass whose calls have several rounds: of all rounds together, and the last hop home.
    `work` is the compute of a round, `t` the tokens of each buffer.
    """
    one = {"kv": rates.latency + far * rates.kv * t, "dkv": rates.latency + far * rates.dkv * t}
    rounds = range(schedule.rounds(degree, direction))
    compute = [work(round_) if round_ < degree else 0.0 for round_ in rounds]
    transfer = [
        sum(one[sent.kind] for sent in schedule.transfers(degree, part, round_, direction)) for round_ in rounds
    ]
    if direction == "backward" and rates.rounds_per_call > 1 and degree > 1:
        return hide(rates, sum(compute), sum(transfer) - one["dkv"]) + one["dkv"]
    return sum(hide(rates, *both) for both in zip(compute, transfer, strict=True))


def slow_calls(rounds: int, most: int) -> float:
    """Calls of attention for so many rounds, where a part of the last call counts as a part."""
    last = schedule.call_of_round(rounds - 1, most)
    start, stop = schedule.call_start(last, most), schedule.call_start(last + 1, most)
    return last + (rounds - start) / (stop - start)


def slow_fixed(rates: Rates, degree: int, part: float, round_: int) -> float:
    """Fixed times of a round: none in the first; with calls of several rounds, in the mean over all rounds."""
    each = rates.round + rates.ring + rates.merge * part if degree > 1 else 0.0
    if rates.rounds_per_call > 1:
        return each * (slow_calls(degree, rates.rounds_per_call) - 1) / degree
    return each if round_ > 0 else 0.0


def slow_shared(rates: Rates, tokens: float, degree: int, far: float, pairs: Callable[[int], float]) -> float:
    """Time of a sequence on its ring; `pairs` gives the pairs of a rank in a round."""
    part = tokens / degree

    def beside(round_: int) -> float:
        return slow_fixed(rates, degree, part, round_)

    forward = walk(rates, degree, 0, "forward", lambda at: rates.pair_f * pairs(at) + beside(at), far, part)
    backward = walk(rates, degree, 0, "backward", lambda at: rates.pair_b * pairs(at) + beside(at), far, part)
    linear = (rates.token_f + rates.token_b) * part
    return linear + (1.0 + rates.recompute_factor) * forward + backward + rates.sequence


def test_calls_of_rounds() -> None:
    assert [calls(rounds, 4) for rounds in (1, 2, 3, 7, 9, 11, 15)] == [1, 1.5, 2, 3, 3.5, 4, 5]
    assert [calls(rounds, 1) for rounds in (1, 2, 9)] == [1, 2, 9]
    for most in (1, 2, 4, 8):
        numbers = [schedule.call_of_round(round_, most) for round_ in range(40)]
        assert numbers[:3] == ([0, 1, 1] if most > 1 else [0, 1, 2])
        sizes = [numbers.count(number) for number in range(numbers[-1])]
        assert all(after == min(most, 2 * size) for size, after in pairwise(sizes))
        assert [schedule.call_start(number, most) for number in range(numbers[-1])] == [
            numbers.index(number) for number in range(numbers[-1])
        ]


@given(RATES, SOME, SOME)
def test_what_does_not_overlap_comes_on_top(rates: Rates, compute: float, transfer: float) -> None:
    found = hide(rates, compute, transfer)
    assert max(compute, transfer) <= found <= (compute + transfer) * (1 + EXACT)
    assert hide(rates._replace(overlap=0.0), compute, transfer) == pytest.approx(compute + transfer)
    assert hide(rates._replace(overlap=1.0), compute, transfer) == max(compute, transfer)


@given(RATES, st.integers(2, 9), SOME, SOME, st.integers(1, 10_000), st.data())
def test_rounds_forward(
    rates: Rates, degree: int, first: float, compute: float, part: int, data: st.DataObject
) -> None:
    member = data.draw(st.integers(0, degree - 1))  # all of them send and compute as much
    kv = rates.latency + rates.kv * part
    slow = walk(rates, degree, member, "forward", lambda round_: compute if round_ else first, 1.0, float(part))
    assert forward_ring(rates, degree, first, compute, kv) == pytest.approx(slow, rel=EXACT)


@given(RATES, st.integers(2, 9), SOME, SOME, st.integers(1, 10_000), st.data())
def test_rounds_backward(
    rates: Rates, degree: int, first: float, compute: float, part: int, data: st.DataObject
) -> None:
    """dK,dV are sent one round later, and home in a round of their own."""
    member = data.draw(st.integers(0, degree - 1))
    kv, dkv = rates.latency + rates.kv * part, rates.latency + rates.dkv * part
    one_round = rates._replace(rounds_per_call=1)
    slow = walk(one_round, degree, member, "backward", lambda round_: compute if round_ else first, 1.0, float(part))
    assert backward_ring(one_round, degree, first, compute, kv, dkv) == pytest.approx(slow, rel=EXACT)


@given(RATES, st.integers(2, 40), SOME, SOME, SOME, SOME)
def test_calls_of_several_rounds_take_no_less_backward(
    rates: Rates, degree: int, first: float, compute: float, kv: float, dkv: float
) -> None:
    """Than the sum over calls, each with the hops that run meanwhile: the lower bound rests on it."""
    most, total = rates.rounds_per_call, 0.0
    starts = [schedule.call_start(call, most) for call in range(degree + 3)]
    for call in range(degree + 1):
        before = starts[call - 1] if call else 0
        rounds = [min(place, degree) for place in (before, *starts[call : call + 3])]
        leave, own, arrive = np.diff(rounds).tolist()
        total += hide(rates, own * compute if call else first, arrive * kv + leave * dkv)
    assert backward_ring(rates, degree, first, compute, kv, dkv) <= total * (1 + EXACT)
    if most == 1:
        assert backward_ring(rates, degree, first, compute, kv, dkv) == pytest.approx(total, rel=EXACT)


@given(RATES, st.integers(1, 10**6), DEGREES, st.booleans())
def test_a_sequence_on_its_ring(rates: Rates, tokens: int, degree: int, leaves: bool) -> None:
    far = rates.inter_node_slowdown if leaves else 1.0
    mean = slow_pairs(rates, tokens) / degree**2
    slow = slow_shared(rates, float(tokens), degree, far, lambda round_: mean)
    assert shared(rates, float(tokens), degree, far) == pytest.approx(slow, rel=EXACT)


@given(RATES, st.integers(10, 500), st.integers(2, 9), st.data())
def test_a_round_has_about_as_many_pairs_as_any(rates: Rates, chunk: int, degree: int, data: st.DataObject) -> None:
    """With the blocks that really meet: only the first, causal round differs, by half a chunk a row."""
    tokens, part = 2 * degree * chunk, data.draw(st.integers(0, degree - 1))
    rates = rates._replace(windowed=0.0)

    def met(round_: int) -> float:
        if round_ == 0:
            rows = tokens // degree
            return rows * (rows + 1) / 2
        (block,) = schedule.blocks(tokens, degree, part, [schedule.kv_part(degree, part, round_)])
        return float((block.q_stop - block.q_start) * sum(block.keys))

    slow = slow_shared(rates, float(tokens), degree, 1.0, met)
    assert shared(rates, float(tokens), degree, 1.0) == pytest.approx(slow, rel=1 / chunk)


@given(RATES, st.integers(1, 10**6), st.integers(0, 10**6), st.integers(2, 16), st.sampled_from([1, 2, 4]))
def test_a_slice_in_the_best_team(rates: Rates, tokens: int, before: int, degree: int, most: int) -> None:
    """A team of c has D / c rounds, in which K,V of c times fewer parts pass, and exchanges queries and results."""
    causal, times = slow_pairs(rates, tokens, before), {}
    for team in [team for team in (1, 2, 4) if team <= most and degree % team == 0]:
        turns, part, carried = degree // team, tokens / degree, (tokens + before) / degree
        fixed = rates.round + rates.ring + rates.merge * part * team
        whole = fixed if team > 1 or before > 0 else 0.0  # of the first round
        mean = (whole + fixed * (slow_calls(turns, rates.rounds_per_call) - 1)) / turns
        beside = [whole, fixed] if rates.rounds_per_call == 1 else [mean, mean]

        def work(round_: int, pair: float, each: float = causal / degree / turns, own: list[float] = beside) -> float:
            return pair * each + own[min(round_, 1)]

        forward = walk(rates, turns, 0, "forward", partial(work, pair=rates.pair_f), 3.0, carried)
        backward = walk(rates, turns, 0, "backward", partial(work, pair=rates.pair_b), 3.0, carried)
        if team > 1:
            sent = 3.0 * (team - 1) * part
            forward += 2 * rates.latency + sent * (rates.query + rates.result)
            backward += 2 * rates.latency + sent * (3 * rates.query + rates.result)
        linear = (rates.token_f + rates.token_b) * part
        times[team] = linear + (1.0 + rates.recompute_factor) * forward + backward + rates.sequence
    found, team = in_team(rates._replace(team=most), float(tokens), float(before), degree, 3.0)
    assert found == pytest.approx(min(times.values()), rel=EXACT) == pytest.approx(times[team], rel=EXACT)
    assert together(rates, float(tokens), causal, 1, degree, 3.0, team, float(before)) == pytest.approx(
        found, rel=EXACT
    )


def test_a_ring_that_waits_for_transfers_gets_faster_in_teams() -> None:
    rates = FAST._replace(pair_f=1e-6, pair_b=1e-6, kv=1.0, dkv=2.0, query=4.0, result=8.0)
    alone, in_teams = (shared(rates._replace(team=team), 2.0**20, 256, 1.0) for team in (1, 4))
    assert in_teams < 0.35 * alone
    assert exchange(rates, 10.0, 3, 2.0, QUERIES_F) == 2 * 2 * 10 * (4 + 8)
    assert exchange(rates, 10.0, 3, 2.0, QUERIES_B) == 2 * 2 * 10 * (3 * 4 + 8)


@given(st.integers(1, 99), st.integers(0, 200), st.integers(1, 250), st.sampled_from([0.0, 0.5, 1.0]))
def test_pairs_of_queries_one_by_one(tokens: int, before: int, window: int, windowed: float) -> None:
    rates = FAST._replace(window=float(window), windowed=windowed)
    assert pairs(rates, float(tokens), float(before)) == slow_pairs(rates, tokens, before)


@given(st.integers(1, 2**26), st.integers(0, 2**25))
def test_without_windows_pairs_are_exact(tokens: int, before: int) -> None:
    assert pairs(FAST, float(tokens), float(before)) == tokens * (tokens + 1) // 2 + tokens * before


@given(RATES, st.integers(1, 10**6))
def test_an_uncut_sequence(rates: Rates, tokens: int) -> None:
    attention = (rates.pair_f * (1 + rates.recompute_factor) + rates.pair_b) * slow_pairs(rates, tokens)
    slow = tokens * (rates.token_f + rates.token_b) + attention + rates.sequence
    assert unsplit(rates, float(tokens)) == pytest.approx(slow, rel=EXACT)
    assert shared(rates, float(tokens), 1, rates.inter_node_slowdown) == unsplit(rates, float(tokens)), (
        "it knows no links"
    )


def test_whole_nanoseconds_are_rounded_once() -> None:
    rates = FAST._replace(token_f=0.1, token_b=0.1, pair_f=0.0, pair_b=0.0, sequence=0.0)
    lengths = np.array([1, 2, 3, 7, 8, 10**9], dtype=np.int64)
    assert unsplit_times(rates, lengths).tolist() == [0, 0, 1, 1, 2, 200_000_000]


@pytest.mark.parametrize("tokens", [1000, 10**6])
def test_with_fast_links_more_ranks_are_faster(tokens: int) -> None:
    times = [shared(FAST, float(tokens), degree, 1.0) for degree in range(1, 65)]
    assert times == sorted(times, reverse=True) and len(set(times)) == len(times)
    work = [degree * (time - FAST.sequence) for degree, time in enumerate(times, start=1)]
    assert work == pytest.approx([work[0]] * 64), "and share the work out, no more"


def test_with_slow_links_more_ranks_do_not_help() -> None:
    """A ring bound by transfers takes about tokens x bytes / bandwidth, whatever its degree."""
    bound = FAST._replace(kv=1e4, dkv=2e4)
    times = [shared(bound, 1e4, degree, 1.0) for degree in range(8, 65)]
    assert max(times) < 1.15 * min(times)
    assert min(times) > 1e4 * (bound.kv + bound.dkv)


@given(RATES, st.integers(1, 10**6), DEGREES)
def test_between_nodes_nothing_is_faster(rates: Rates, tokens: int, degree: int) -> None:
    near, far = (shared(rates, float(tokens), degree, times) for times in (1.0, rates.inter_node_slowdown))
    assert far >= near


@given(RATES, st.integers(1, 10**6), DEGREES)
def test_running_forward_again_takes_a_forward_pass(rates: Rates, tokens: int, degree: int) -> None:
    once, twice = (shared(rates._replace(recompute_factor=again), float(tokens), degree, 1.0) for again in (0.0, 1.0))
    mean = slow_pairs(rates, tokens) / degree**2
    part = tokens / degree
    ring = walk(
        rates, degree, 0, "forward", lambda at: rates.pair_f * mean + slow_fixed(rates, degree, part, at), 1.0, part
    )
    assert twice == pytest.approx(once + ring, rel=EXACT)


@given(RATES, st.floats(0.0, 1e3), DEGREES)
def test_a_message_without_bytes_is_as_late_between_nodes_as_inside(rates: Rates, latency: float, degree: int) -> None:
    """`inter_node_slowdown` is a ratio of bandwidths: it multiplies bytes."""
    empty = rates._replace(latency=latency, kv=0.0, dkv=0.0)
    assert shared(empty, 1000.0, degree, rates.inter_node_slowdown) == shared(empty, 1000.0, degree, 1.0)
