from __future__ import annotations

from pathlib import Path

import pytest

from engine.hardware.measured import Case, Timing, read
from tests.hardware.machines import measured


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_was_written_is_read(tmp_path: Path, ranks: int) -> None:
    measured(ranks).write(tmp_path / "measured.json")
    assert read(tmp_path / "measured.json") == measured(ranks)


def test_a_case_in_words() -> None:
    assert str(Case(2, (128, 32, 128), (512,))) == "2 layers, 1 x 32, 2 x 128, ring of 512"
    assert str(Case(1, (64,))) == "1 layer, 1 x 64"


def test_forward_and_backward_together() -> None:
    assert Timing(1.0, 2.5, 0.0).total_s == 3.5
