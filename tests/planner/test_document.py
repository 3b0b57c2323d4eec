"""Figures of docs/planner.md are those of the code."""

from __future__ import annotations

import pytest

from engine.planner.adaptive import adaptive, free


def percent(fraction: float) -> str:
    return f"{100 * fraction:.6g} %"


STATED = (
    f"within {percent(free.CLOSE - 1)} of the bound",
    f"From {free.LARGE:,} sequences on, within {percent(free.CLOSE_IF_LARGE - 1)} is close enough",
    f"if it shortens the step by at least {percent(1 - adaptive._WORTH)}",
    f"at most {adaptive._FEW_PER_RANK} sequences per rank",
    f"at most {adaptive._FEW:,} sequences",
    *(f"| {rule.limit:g} | {rule.stretch:g} | {rule.join:g} |" for rule in free.RULES),
)


@pytest.mark.parametrize("stated", STATED)
def test_it_states_what_the_code_does(stated: str, pytestconfig: pytest.Config) -> None:
    text = (pytestconfig.rootpath / "docs" / "planner.md").read_text(encoding="utf-8")
    assert stated in " ".join(text.split())
