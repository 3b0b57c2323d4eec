from __future__ import annotations

from dataclasses import replace

import pytest

from engine.config.load import load
from engine.cost.model import Costs
from tests.planner.samples import COSTS, ints


def of(*overrides: str) -> Costs:
    return Costs.of(load(["recipe=llama7b-256k", *overrides]))


def test_a_sequence_costs_its_tokens_and_its_causal_pairs() -> None:
    """In whole nanoseconds: they are part of what a plan is a function of."""
    assert COSTS.sequence(ints(1)).dtype == "int64"
    assert COSTS.sequence(ints(1, 2, 100)).tolist() == [1000 + 1, 2000 + 3, 100_000 + 5050]


def test_a_step_of_70b_at_2m_tokens_does_not_overflow() -> None:
    shape = ["layers=80", "hidden=8192", "heads=64", "kv_heads=8", "ffn=28672", "vocab=128256"]
    costs = of(*(f"model.{part}" for part in shape))
    step = ints(*[2 * 1024**2] * 100)  # 200M tokens, six times the paper's global batch
    rates = costs.rates
    exact = 100 * (2**21 * (rates.token_f + rates.token_b) + 2**20 * (2**21 + 1) * (rates.pair_f + rates.pair_b))
    assert int(costs.sequence(step).sum()) == pytest.approx(exact)
    assert costs.flops(step) > 2**63, "FLOPs are Python integers"


def test_states_are_sharded_over_all_ranks() -> None:
    assert of("cluster.nodes=256").fixed_bytes < of("cluster.nodes=128").fixed_bytes


def test_most_tokens_is_the_last_that_fits() -> None:
    for memory in (COSTS.fixed_bytes + COSTS.passing_bytes, 2000, 5000, 10**6):
        most = COSTS.most_tokens(memory)
        assert most == 0 or COSTS.peak_bytes(ints(most), ints(most))[0] <= memory
        assert COSTS.peak_bytes(ints(most + 1), ints(most + 1))[0] > memory
    assert COSTS.most_tokens(0) == 0


def test_a_data_sheets_rates_are_those_of_the_model() -> None:
    costs = of()
    assert costs.rates.token_f == pytest.approx(1e9 * costs.linear_flops / (0.6 * 989e12))
    assert costs.rates.pair_b == pytest.approx(2.5 * costs.rates.pair_f)
    assert "data sheet" in costs.source
    assert costs.seconds(5_000_000_000) == 5.0


def test_tensor_parallel_devices_share_compute_memory_and_traffic() -> None:
    one, two = of(), of("parallel.tp=2")
    assert two.rates.pair_f == pytest.approx(one.rates.pair_f / 2)
    assert one.rates.token_f / 2 < two.rates.token_f < one.rates.token_f, "sums over the devices come on top"
    assert two.rates.kv == pytest.approx(one.rates.kv / 2)
    assert two.token_bytes == one.token_bytes // 2 and two.devices == 2


def test_recomputing_trades_time_for_memory() -> None:
    none, kept, layer = (of(f"recompute={mode}") for mode in ("none", "layer_keep_attention", "layer"))
    assert none.token_bytes > kept.token_bytes > layer.token_bytes
    assert none.rates.token_b < kept.rates.token_b == layer.rates.token_b
    assert (none.rates.again, kept.rates.again, layer.rates.again) == (0, 0, 1)
    assert (none.forward_rings, kept.forward_rings, layer.forward_rings) == (2, 2, 3)


def test_stages_of_zero_hold_less_and_less() -> None:
    held = [of(f"zero.stage={stage}").fixed_bytes for stage in (1, 2, 3)]
    assert held[0] > held[1] > held[2]
    assert of("zero.stage=3").slot > of("zero.stage=2").slot == 0


def test_what_stays_of_an_offloaded_micro_batch_is_equation_3() -> None:
    """Of four layers two always stay, and of the others 1 - r."""
    assert COSTS.resident(ints(1000), ints(0)).tolist() == [1000]
    assert COSTS.resident(ints(1000), ints(500_000)).tolist() == [750]
    assert COSTS.resident(ints(1000), ints(1_000_000)).tolist() == [500]
    assert COSTS.host_bytes(ints(1000), ints(500_000)).tolist() == [250 * COSTS.token_bytes]
    assert replace(COSTS, layers=2).resident(ints(1000), ints(1_000_000)).tolist() == [1000]
