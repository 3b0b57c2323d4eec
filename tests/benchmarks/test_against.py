"""The comparison of two commits: worktrees, ratios, and a comparison of this checkout with itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import against
from tests.benchmarks.rows import measured

pytestmark = pytest.mark.long


def test_a_checkout_beside_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def here(commit: str) -> Iterator[Path]:
        assert commit == "HEAD"
        yield Path(against.__file__).parent.parent

    monkeypatch.setattr(against, "checkout", here)
    *plans, help_ = measured(against, "HEAD", "planning", "help", "--sizes", "8/16", "--turns", "1")["rows"]
    assert [plan["measure"] for plan in plans] == [f"planning 8/16 {of}, ms" for of in ("lognormal", "github", "byted")]
    for row in (*plans, help_):
        assert row["then"] > 0 and row["now"] > 0 and row["ratio"] == row["now"] / row["then"]
    assert all(plan["balance_then"] == plan["balance_now"] for plan in plans)
