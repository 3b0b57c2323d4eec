from __future__ import annotations

import pytest

from benchmarks.plan_recipes import measure


def test_a_row_names_the_recipes_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert measure("h200-1b-8k") > 0
    assert capsys.readouterr().out.startswith("| h200-1b-8k | 1 | ")
