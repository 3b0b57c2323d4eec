from __future__ import annotations

from engine.trackers.tracker import metrics_of
from tests.trackers.samples import line


def test_the_metrics_of_a_step_are_its_numbers() -> None:
    found = metrics_of(
        line(2) | {"flag": True, "unvalidated": ["web"], "mixture": {"web": {"tokens": 9, "wanted": 8.5}}}
    )
    assert found.number == 2
    assert found.metrics == {
        "loss": 2.0,
        "tokens": 1002,
        "validation_losses/web": 4.0,
        "validation_loss": 3.0,
        "mixture/web/tokens": 9,
        "mixture/web/wanted": 8.5,
    }
