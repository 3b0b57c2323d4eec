from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config.load import load
from engine.config.schema import Config
from engine.cost.allowance import Allowance
from engine.data.profile import Suggestion, describe, suggest
from engine.data.scan import Documents, mixed
from engine.data.sequences import piece_bounds
from engine.errors import MemoryFitError
from engine.job import Job
from engine.planner.make import plan_step
from engine.units import Ints

K = 1024
RANKS = ["cluster.ranks_per_node=4", "planner=balanced"]


def ints(*values: int) -> Ints:
    return np.array(values, dtype=np.int64)


def suggested(lengths: Ints, *overrides: str) -> tuple[Suggestion, Config]:
    config = load([*RANKS, *overrides])
    settings = Job(config).settings
    return suggest(Documents(lengths), Job(config), settings.costs.most_tokens(settings.device_memory)), config


def memory_of(tokens: int) -> str:
    """The override with which a device holds exactly `tokens` tokens, all in rings."""
    job = Job(load(RANKS))
    costs = job.costs
    allowance, tensors = Allowance.of(job.config, job.cluster), int(costs.peak_bytes(ints(tokens), ints(tokens))[0])
    return f"cluster.device_memory={tensors + allowance.context + allowance.fragmentation(tensors)}"


def test_percentiles_are_lengths_that_occur() -> None:
    said = describe(Documents(np.arange(1, 1001), empty=3), context=10**6)
    assert [said[name] for name in ("p50", "p90", "p99", "p999", "max")] == [500, 900, 990, 999, 1000]
    assert (said["samples"], said["tokens"], said["mean"], said["empty"]) == (1000, 500_500, 500.5, 3)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60))
def test_buckets_hold_every_document_once(values: list[int]) -> None:
    buckets = describe(Documents(ints(*values)), context=7)["buckets"]
    lower = 0
    for bucket in buckets:
        inside = [
            value for value in values if (bucket["upto"] // 2 if bucket["upto"] > 1 else 0) < value <= bucket["upto"]
        ]
        assert (bucket["samples"], bucket["tokens"]) == (len(inside), sum(inside))
        assert bucket["upto"] > lower
        lower = bucket["upto"]
    assert sum(bucket["samples"] for bucket in buckets) == len(values)
    assert buckets[0]["samples"] > 0 < buckets[-1]["samples"]


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(1, 400))
def test_sequences_are_counted_without_cutting(values: list[int], context: int) -> None:
    said = describe(Documents(ints(*values)), context)
    assert said["sequences"] == len(piece_bounds(ints(*values), context)[2])


def test_a_sample_is_extrapolated() -> None:
    whole = describe(Documents(ints(5, 9, 100), empty=1), context=50)
    part = describe(Documents(ints(5, 9, 100), empty=1, fraction=0.25), context=50)
    for name in ("samples", "tokens", "sequences", "empty"):
        assert part[name] == 4 * whole[name]
    assert [b["tokens"] for b in part["buckets"]] == [4 * b["tokens"] for b in whole["buckets"]]
    assert (part["p50"], part["max"], part["mean"]) == (whole["p50"], whole["max"], whole["mean"])
    assert part["read"] == {"samples": 3, "tokens": 114, "share": 0.25}


LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=20)


@given(LENGTHS, LENGTHS, st.integers(1, 5), st.integers(1, 5))
def test_a_mixture_is_described_like_documents_that_are_repeated(
    web: list[int], code: list[int], web_epochs: int, code_epochs: int
) -> None:
    """Weights are shares of tokens, so sources that are read several times have several times their tokens."""
    weights = {"web": sum(web) * web_epochs, "code": sum(code) * code_epochs, "none": 0}
    found = {"web": Documents(ints(*web)), "code": Documents(ints(*code)), "none": Documents(ints(10**6))}
    got = describe(mixed(found, weights), context=100)
    want = describe(Documents(ints(*web * web_epochs, *code * code_epochs)), context=100)
    for name in ("p50", "p90", "p99", "p999", "max"):
        assert got[name] == want[name], name
    assert got["mean"] == pytest.approx(want["mean"])
    assert (got["tokens"], got["read"]["tokens"]) == (sum(web) + sum(code), sum(web) + sum(code))
    ratio = got["tokens"] / want["tokens"]
    for name in ("samples", "sequences"):
        assert got[name] == pytest.approx(want[name] * ratio, abs=1), name
    assert [b["upto"] for b in got["buckets"]] == [b["upto"] for b in want["buckets"]]
    for bucket, other in zip(got["buckets"], want["buckets"], strict=True):
        assert bucket["tokens"] == pytest.approx(other["tokens"] * ratio, abs=1)


def test_samples_of_sources_count_for_all_that_they_stand_for() -> None:
    """Half of the tokens are of each source, though a tenth of one and all of the other was read."""
    found = {"a": Documents(ints(10, 30), empty=1, fraction=0.1), "b": Documents(ints(5, 5), empty=2)}
    got = mixed(found, {"a": 1, "b": 1})
    of_source = got.counts * got.lengths
    assert of_source[:2].sum() == pytest.approx(of_source[2:].sum())
    assert (got.fraction, got.empty) == (50 / 410, 3)
    assert describe(got, context=100)["tokens"] == 410
    assert mixed({"a": found["a"]}, {"a": 7}) is found["a"]


def test_suggestions_for_a_mixture_are_those_for_documents_that_are_repeated() -> None:
    config = load([*RANKS, "context=8K", "capacity=2K", "batch_tokens=4K"])
    web, code = [100] * 60, [3000] * 3
    repeated = Documents(ints(*web, *code * 7))
    mixture = mixed({"w": Documents(ints(*web)), "c": Documents(ints(*code))}, {"w": 6000, "c": 63000})
    assert suggest(mixture, Job(config), 10**6) == suggest(repeated, Job(config), 10**6)


def test_a_capacity_that_holds_99_percent_of_the_sequences() -> None:
    lengths = np.concatenate([np.full(990, 100), np.full(9, 3000), [8000]])
    found, _ = suggested(lengths, "context=8K", "capacity=2K", "batch_tokens=4K")
    assert (found.capacity, found.fits) == (2 * K, True)
    assert "context / ranks" in found.reason  # 99 % need 1K only
    found, _ = suggested(np.append(lengths, np.full(10, 3000)), "context=8K", "capacity=2K", "batch_tokens=4K")
    assert (found.capacity, found.reason) == (3 * K, "99% of the sequences fit on one rank")


def test_a_capacity_for_a_ranks_part_of_a_step() -> None:
    found, _ = suggested(np.full(100, 300), "context=2K", "capacity=1K", "batch_tokens=42K")
    assert (found.capacity, found.reason) == (11 * K, "each rank runs its part of a step as one micro-batch")


def test_the_largest_capacity_that_fits() -> None:
    """`plan_step` refuses a capacity that does not fit, so it shows that the suggestion is the largest."""
    own = ["context=8K", "capacity=2K", "batch_tokens=64K", memory_of(5 * K + 7), "cluster.headroom=0"]
    found, config = suggested(np.full(100, 8 * K), *own)
    assert (found.capacity, found.reason, found.fits) == (5 * K, "the most that fits without offload", True)
    settings = Job(config).settings
    plan_step(np.full(8, 8 * K), replace(settings, capacity=5 * K))
    with pytest.raises(MemoryFitError):
        plan_step(np.full(8, 8 * K), replace(settings, capacity=6 * K))


def test_a_context_that_the_memory_cannot_hold() -> None:
    found, _ = suggested(np.full(10, 8 * K), "context=8K", "capacity=2K", "batch_tokens=8K", memory_of(1000))
    assert (found.capacity, found.fits) == (2 * K, False)


def test_rounding_does_not_go_below_the_lower_bound() -> None:
    """context / ranks = 2,000 lies between the 2,010 that fit and the 1K that rounding would leave."""
    found, _ = suggested(
        np.full(10, 8000), "context=8000", "capacity=2K", "batch_tokens=64K", memory_of(2010), "cluster.headroom=0"
    )
    assert (found.capacity, found.fits) == (2000, True)


def test_the_largest_ring_holds_the_longest_and_shares_its_cost() -> None:
    own = ["context=16K", "capacity=4K", "batch_tokens=16K"]
    even, config = suggested(np.full(1000, 16 * K), *own)
    assert even.ring_limit == 4
    lengths = np.concatenate([np.full(2000, 1000), [12 * K]])
    rare, config = suggested(lengths, *own)
    costs = Job(config).settings.costs
    of_a_rank = costs.sequence(lengths).sum() / lengths.sum() * config.batch_tokens / 4
    needed = max(12 * K / rare.capacity, costs.sequence(ints(12 * K))[0] / of_a_rank)
    assert rare.ring_limit == min(4, int(np.ceil(needed)))
    short, _ = suggested(np.full(1000, 100), *own)
    assert short.ring_limit == 1
