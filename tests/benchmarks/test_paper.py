"""The whole computation on one step instead of 24; the figures themselves are in docs/paper.md."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import paper
from tests.benchmarks.rows import measured

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(paper.ASSUMED, "steps", 1)


def test_one_cell_of_the_table() -> None:
    settings = replace(paper.settings_of("llama7b", "256K"), offload=0)
    steps = paper.steps_of("llama7b", "github", "256K")
    assert settings.ranks == 512, "1,024 GPUs, two a rank"
    (step,) = steps
    assert step.max() == 256 * 1024 and 0.9 * 2**25 < step.sum() <= 2**25
    static, naive, balanced, adaptive = (paper.seconds(steps, settings.by(planner)) for planner in paper.PLANNERS)
    assert paper.ASSUMED["step_s"] < adaptive <= balanced < naive < static


def test_the_assumed_rates_are_taken() -> None:
    rates = paper.settings_of("llama7b", "256K").costs.rates
    assert rates.pair_b == pytest.approx(paper.ASSUMED["attention_backward"] * rates.pair_f)


def test_the_case_study_has_a_row_a_planner() -> None:
    found = measured(paper, "case")
    assert [(row["planner"], row["paper_s"]) for row in found["rows"]] == [
        ("static", 520),
        ("naive", 272),
        ("balanced", 157),
        ("adaptive", None),
    ]
    assert found["summary"] == {}, "only of the table"


def test_figures_of_7b_within_30_percent_are_counted() -> None:
    row = {"model": "llama7b", "naive_off_%": -31.0, "balanced_off_%": 29.0}
    others = [{"model": "llama70b", "naive_off_%": 0.0, "balanced_off_%": 0.0}, {"model": "llama7b", "gain": 1.0}]
    assert paper.summary([row, *others]) == {"7B within 30 %": "1 of 2"}
