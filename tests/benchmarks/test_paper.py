"""The whole computation on one step instead of 24; the figures themselves are in docs/paper.md."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import paper

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
