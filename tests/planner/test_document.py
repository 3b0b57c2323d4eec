"""Figures of docs/planner.md are those of the code."""

from __future__ import annotations

import pytest

from engine.planner import adaptive, free, search, small


def percent(share: float) -> str:
    return f"{100 * share:.6g} %"


SAID = (
    f"heights differ by less than {percent(free._EVEN[0][1])} of T",
    f"until one is within {percent(free._CLOSE - 1)} of the bound",
    f"From {free._LARGE:,} sequences on the first two must do, and within {percent(free._CLOSE_IF_LARGE - 1)} is near",
    f"join runs that differ by up to {percent(max(rule[1] for rule in free._MORE))}",
    f"where it shortens the step by {percent(1 - adaptive._WORTH)}",
    f"sequences x ranks up to {small._MOST}) are searched: degrees and order, {search._TRIES:,} tries",
)


@pytest.mark.parametrize("said", SAID)
def test_it_says_what_the_code_does(said: str, pytestconfig: pytest.Config) -> None:
    text = (pytestconfig.rootpath / "docs" / "planner.md").read_text(encoding="utf-8")
    assert said in " ".join(text.split())
    assert len(free._EVEN) == 2
