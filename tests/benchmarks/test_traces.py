from __future__ import annotations

import numpy as np
import pytest

from benchmarks.traces import TRACES, compute_only, draw, settings_of
from engine.planner.adaptive.workload import lower_bound


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize(("ranks", "mode"), [(4, "free"), (8, "lockstep"), (64, "free")])
def test_a_trace_is_a_step_that_its_ranks_hold(trace: str, ranks: int, mode: str) -> None:
    settings, lengths = settings_of(trace, ranks, mode), draw(trace, ranks, 50, seed=1)
    assert (settings.ranks, settings.mode) == (ranks, mode)
    assert len(lengths) == 50 and lengths.min() >= 1
    assert lengths.max() <= settings.context <= ranks * settings.capacity
    assert np.array_equal(lengths, draw(trace, ranks, 50, seed=1))
    assert not np.array_equal(lengths, draw(trace, ranks, 50, seed=2))


def test_compute_only_is_linear_layers_and_attention_and_nothing_else() -> None:
    """So the bound is the mean work of a rank."""
    settings = compute_only(settings_of("lognormal", 8))
    rates, lengths = settings.costs.rates, draw("lognormal", 8, 64, seed=0)
    linear = (rates.token_f + rates.token_b) * lengths
    attention = (rates.pair_f + rates.pair_b + rates.recompute_factor * rates.pair_f) * lengths * (lengths + 1.0) / 2
    assert settings.offload == 0
    assert lower_bound(lengths, settings) == pytest.approx((linear + attention).sum() / 8, rel=1e-3)
