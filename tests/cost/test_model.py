from __future__ import annotations

from dataclasses import fields, replace

import pytest

from engine.config.load import load
from engine.cost.flops import UNIT
from engine.cost.model import Costs
from tests.planner.samples import COSTS, ints


def of(*overrides: str) -> Costs:
    return Costs.of(load(["recipe=llama7b-256k", *overrides]))


def test_costs_are_integers() -> None:
    """They are part of what a plan is a function of; a float could differ between machines."""
    costs = of()
    assert {type(getattr(costs, field.name)) for field in fields(costs)} == {int}


def test_a_sequence_costs_its_tokens_and_its_causal_pairs() -> None:
    assert COSTS.sequence(ints(1, 2, 100)).tolist() == [1000 + 1, 2000 + 3, 100_000 + 5050]


def test_a_step_of_70b_at_2m_tokens_does_not_overflow() -> None:
    shape = ["layers=80", "hidden=8192", "heads=64", "kv_heads=8", "ffn=28672", "vocab=128256"]
    costs = of(*(f"model.{part}" for part in shape))
    step = ints(*[2 * 1024**2] * 100)  # 200M tokens, six times the paper's global batch
    exact = 100 * (2**21 * costs.linear + 2**21 * (2**21 + 1) // 2 * costs.attention)
    assert int(costs.sequence(step).sum()) == exact
    assert exact * UNIT > 2**63, "in single operations it would"


def test_states_are_sharded_over_all_ranks() -> None:
    assert of("cluster.nodes=256").fixed_bytes < of("cluster.nodes=128").fixed_bytes


def test_most_tokens_is_the_last_that_fits() -> None:
    for memory in (COSTS.fixed_bytes + COSTS.passing_bytes, 2000, 5000, 10**6):
        most = COSTS.most_tokens(memory)
        assert most == 0 or COSTS.peak_bytes(ints(most), ints(most))[0] <= memory
        assert COSTS.peak_bytes(ints(most + 1), ints(most + 1))[0] > memory
    assert COSTS.most_tokens(0) == 0


def test_seconds_are_units_over_the_nominal_rate() -> None:
    assert replace(COSTS, flops_per_s=10**9).seconds(5_000_000) == pytest.approx(5.0)
    assert of().flops_per_s == pytest.approx(0.4 * 989e12)
    assert Costs.of(load([])).flops_per_s == 50_000_000_000
