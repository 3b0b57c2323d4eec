"""A row of `benchmarks/tune.py --static` says how far a recipe is from what is found, and what was not searched."""

from __future__ import annotations

import pytest

from benchmarks import tune


def test_a_recipe_that_is_slower_than_what_is_found_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "SECONDS", 2)
    monkeypatch.setattr(tune, "APART", ())
    assert not tune.recipes(["quickstart"]), "its capacity shows rings"
    cells = [cell.strip() for cell in capsys.readouterr().out.splitlines()[-1].strip("|").split("|")]
    assert cells[0] == "quickstart" and float(cells[3]) > tune.CLOSE
    assert all(cell.endswith(("complete", " left after 2 s")) for cell in (cells[4], cells[7]))
    monkeypatch.setattr(tune, "APART", ("quickstart",))
    assert tune.recipes(["quickstart"])
