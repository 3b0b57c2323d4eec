from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np
import pytest

from engine.report.curves import loss_picture, running_median, throughput_picture
from tests.report.samples import LOSS, STEPS, VALIDATION, texts


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_loss_that_is_not_finite_leaves_a_gap(bad: float) -> None:
    some = np.where(STEPS == 20, bad, LOSS)
    all_ = np.full_like(LOSS, bad)
    for loss in (some, all_):
        svg = loss_picture(STEPS, loss, VALIDATION, 2.43)
        ET.fromstring(svg)
        assert "NaN" not in svg and ' d="M nan' not in svg and "inf " not in svg


def test_what_is_not_known_is_not_drawn() -> None:
    svg = loss_picture(STEPS, LOSS, np.full_like(LOSS, np.nan), float("nan"))
    assert not [text for text in texts(svg) if "validation" in text or "bigram" in text]


@pytest.mark.parametrize("steps", [1, 2, 600])
def test_any_number_of_steps_can_be_drawn(steps: int) -> None:
    at = np.arange(1.0, steps + 1)
    shown = texts(loss_picture(at, at, at, 2.43))
    assert "step" in shown and "0.96" not in shown  # ticks of steps are whole numbers
    assert "step" in texts(throughput_picture(at, at))


def test_running_median_of_a_jump_and_a_spike() -> None:
    values = np.array([1.0, 1, 1, 9, 1, 1, 5, 5, 5, 5])
    assert running_median(values).tolist() == [
        float(np.median(values[max(0, at - 2) : at + 3])) for at in range(len(values))
    ]
    assert running_median(values)[3] == 1.0


def test_axes_have_titles_and_units() -> None:
    assert {"step", "loss (nats a token)", "bigram entropy, 2.43"} <= set(
        texts(loss_picture(STEPS, LOSS, VALIDATION, 2.43))
    )
    assert {"step", "throughput (tokens/s)"} <= set(texts(throughput_picture(STEPS, LOSS)))
