from __future__ import annotations

import pytest

from benchmarks import tune
from tests.benchmarks.rows import measured

pytestmark = pytest.mark.long


def test_a_recipe_that_is_slower_than_what_is_found_misses_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "SECONDS", 0.5)
    monkeypatch.setattr(tune, "APART", ())
    (row,) = measured(tune, "static/quickstart")["rows"]
    assert row["recipe"] == "quickstart" and row["ratio"] > tune.CLOSE and not row["holds"], "its capacity shows rings"
    assert all(state.endswith(("complete", " left after 0.5 s")) for state in (row["search"], row["search_static"]))
    monkeypatch.setattr(tune, "APART", ("quickstart",))
    assert measured(tune, "static/quickstart")["rows"][0]["holds"]
