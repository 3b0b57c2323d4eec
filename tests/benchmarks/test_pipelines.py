from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks import paper, pipelines
from tests.benchmarks.rows import measured

pytestmark = pytest.mark.long

MEANS = ("1F1B", "own order", "slices", "slices in teams", "several rounds a call")


def test_each_means_makes_a_step_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of the paper's 70B row on a quarter of its devices, and its mean."""
    small = {"steps": 1, "batch_tokens": "8M", "devices": paper.ASSUMED["devices"] | {"llama70b": 2048}}
    for name, value in small.items():
        monkeypatch.setitem(paper.ASSUMED, name, value)
    step, mean = measured(pipelines, "paper/512K")["rows"]
    assert all(1 <= later <= 1.02 * earlier for earlier, later in pairwise(step[means] for means in MEANS))
    assert step["several rounds a call"] < 0.85 * step["1F1B"] and step["cuts"] > 0
    assert mean == {"mean of": "512K"} | {key: pytest.approx(step[key]) for key in mean if key != "mean of"}
