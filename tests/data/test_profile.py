from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config.load import load
from engine.config.schema import Config
from engine.cost.allowance import Allowance
from engine.data.lengths import step_lengths
from engine.data.profile import Suggestion, a_step, describe, documents, suggest
from engine.data.scan import Documents
from engine.data.steps import piece_bounds
from engine.errors import ConfigError, MemoryFitError
from engine.planner.make import plan_step
from engine.planner.plan import Ints
from engine.planner.settings import PlanSettings

K = 1024
RANKS = ["cluster.ranks_per_node=4", "planner=balanced"]


def ints(*values: int) -> Ints:
    return np.array(values, dtype=np.int64)


def suggested(lengths: Ints, *overrides: str) -> tuple[Suggestion, Config]:
    config = load([*RANKS, *overrides])
    return suggest(lengths, config, PlanSettings.of(config)), config


def memory_of(tokens: int) -> str:
    """Return the override with which a device holds just so many tokens, all of them in rings."""
    costs = PlanSettings.of(load(RANKS)).costs
    beside = Allowance.of(load([])).context
    return f"cluster.device_memory={beside + costs.peak_bytes(ints(tokens), ints(tokens))[0]}"


def test_percentiles_are_lengths_that_stand_there() -> None:
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
    part = describe(Documents(ints(5, 9, 100), empty=1, share=0.25), context=50)
    for name in ("samples", "tokens", "sequences", "empty"):
        assert part[name] == 4 * whole[name]
    assert [b["tokens"] for b in part["buckets"]] == [4 * b["tokens"] for b in whole["buckets"]]
    assert (part["p50"], part["max"], part["mean"]) == (whole["p50"], whole["max"], whole["mean"])
    assert part["read"] == {"samples": 3, "tokens": 114, "share": 0.25}


def test_a_capacity_that_leaves_99_of_100_whole() -> None:
    lengths = np.concatenate([np.full(990, 100), np.full(9, 3000), [8000]])
    found, _ = suggested(lengths, "context=8K", "capacity=2K", "batch_tokens=4K")
    assert (found.capacity, found.fits) == (2 * K, True)
    assert "context / ranks" in found.reason  # 99 % need 1K only
    found, _ = suggested(np.append(lengths, np.full(10, 3000)), "context=8K", "capacity=2K", "batch_tokens=4K")
    assert (found.capacity, found.reason) == (3 * K, "99 % of the sequences are whole on one rank")


def test_a_capacity_of_a_ranks_share() -> None:
    found, _ = suggested(np.full(100, 300), "context=2K", "capacity=1K", "batch_tokens=42K")
    assert (found.capacity, found.reason) == (11 * K, "a rank's share of a step is one micro-batch")


def test_a_capacity_that_fits_and_no_larger_one_does() -> None:
    """`plan_step` refuses one that does not fit, so it tells whether the suggestion is the most."""
    own = ["context=8K", "capacity=2K", "batch_tokens=64K", memory_of(5 * K + 7)]
    found, config = suggested(np.full(100, 8 * K), *own)
    assert (found.capacity, found.reason, found.fits) == (5 * K, "the most that fits the device", True)
    settings = PlanSettings.of(config)
    plan_step(np.full(8, 8 * K), replace(settings, capacity=5 * K))
    with pytest.raises(MemoryFitError):
        plan_step(np.full(8, 8 * K), replace(settings, capacity=6 * K))


def test_a_context_that_the_memory_cannot_hold() -> None:
    found, _ = suggested(np.full(10, 8 * K), "context=8K", "capacity=2K", "batch_tokens=8K", memory_of(1000))
    assert (found.capacity, found.fits) == (2 * K, False)


def test_what_just_fits_is_not_rounded_away() -> None:
    """context / ranks = 2,000 lies between the 2,010 that fit and the 1K that rounding would leave."""
    found, _ = suggested(np.full(10, 8000), "context=8000", "capacity=2K", "batch_tokens=64K", memory_of(2010))
    assert (found.capacity, found.fits) == (2000, True)


def test_the_largest_ring_holds_the_longest_and_shares_its_cost() -> None:
    own = ["context=16K", "capacity=4K", "batch_tokens=16K"]
    even, config = suggested(np.full(1000, 16 * K), *own)
    assert even.ring_limit == 4
    lengths = np.concatenate([np.full(2000, 1000), [12 * K]])
    rare, config = suggested(lengths, *own)
    costs = PlanSettings.of(config).costs
    of_a_rank = costs.sequence(lengths).sum() / lengths.sum() * config.batch_tokens / 4
    needed = max(12 * K / rare.capacity, costs.sequence(ints(12 * K))[0] / of_a_rank)
    assert rare.ring_limit == min(4, int(np.ceil(needed)))
    short, _ = suggested(np.full(1000, 100), *own)
    assert short.ring_limit == 1


def test_documents_of_a_mix_are_drawn() -> None:
    config = load(["lengths=byted", "lengths.max=64K"])
    first, again = (documents(config, 5000).lengths for _ in range(2))
    assert len(first) == 5000
    np.testing.assert_array_equal(first, again)
    assert len(documents(config, None).lengths) == 2**20


def test_documents_of_a_file_are_those_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("7\n9000\n", encoding="utf-8")
    config = load(["lengths=file", f"lengths.path={tmp_path / 'a.txt'}"])
    assert documents(config, None).lengths.tolist() == [7, 9000]
    with pytest.raises(ConfigError, match="read whole"):
        documents(config, 5)


def test_documents_of_a_recipe_are_measured(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number:02d}.txt").write_bytes(b"x" * number)
    config = load(["data=folder", f"data.path={tmp_path}", "batch_tokens=64", "context=8", "capacity=8"])
    found = documents(config, None)
    assert found.lengths.tolist() == list(range(2, 21))
    step = a_step(config, found)
    assert 44 < step.sum() <= 64
    assert step.max() == 8


def test_a_step_of_a_mix_is_that_which_plan_draws() -> None:
    config = load(["lengths=github", "lengths.max=8K", "batch_tokens=32K"])
    np.testing.assert_array_equal(a_step(config, documents(config, 10)), next(step_lengths(config, 1)))
