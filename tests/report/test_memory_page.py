from __future__ import annotations

import pytest

from engine.config.load import load
from engine.fit.estimate import estimate
from engine.job import Job
from engine.report.memory_page import memory_picture
from engine.report.words import MEMORY, memory_parts, memory_rows, memory_unit
from tests.presets import LLAMA7B_2M
from tests.report.samples import ESTIMATE, texts


def test_the_parts_add_up_to_the_peak() -> None:
    assert sum(memory_parts(ESTIMATE).values()) == ESTIMATE.peak
    rows = {name: (size, share) for name, size, share in memory_rows(ESTIMATE)}
    assert rows["device total"] == ("80.00", "100%")
    assert float(rows["peak"][0]) == pytest.approx(ESTIMATE.peak / 2**30, abs=0.01)


def test_each_part_has_its_bar_and_its_size() -> None:
    shown = set(texts(memory_picture(ESTIMATE)))
    assert set(MEMORY.values()) <= shown
    assert {f"{size / 2**30:.1f}" for size in memory_parts(ESTIMATE).values()} <= shown


def test_it_says_whether_it_fits() -> None:
    config = load([*LLAMA7B_2M, "offload.ratio=0", "capacity=64K"])
    too_much = memory_picture(estimate(Job(config)))
    assert "it fits" in memory_picture(ESTIMATE) and "it does not fit" in too_much


def test_a_tiny_model_is_shown_in_mib_in_text_and_picture_alike() -> None:
    config = load(["recipe=quickstart"])
    tiny = estimate(Job(config))
    assert (memory_unit(tiny.peak), memory_unit(ESTIMATE.peak)) == (("MiB", 2**20), ("GiB", 2**30))
    sizes = {name: float(size.replace(",", "")) for name, size, _ in memory_rows(tiny)}
    assert 0 < sizes["parameters"] == pytest.approx(tiny.items["parameters"] / 2**20, abs=0.01)
    picture = memory_picture(tiny)
    assert "MiB per device" in texts(picture) and f"{tiny.peak / 2**20:,.1f} of 4,096.0 MiB: it fits." in picture
    assert "GiB per device" in texts(memory_picture(ESTIMATE))
