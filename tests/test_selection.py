"""Selection among implementations; tests/attention/kernels/test_choice.py shows it with real kernels."""

from __future__ import annotations

import logging

import pytest

from engine.selection import Candidate, first_line, select


def missing(name: str) -> str:
    raise ModuleNotFoundError(f"No module named '{name}'", name=name)


def candidate(name: str, fault: str | None = None, unsupported: str | None = None) -> Candidate[str]:
    return Candidate(name, f"title of {name}", lambda: name, lambda implementation: fault, unsupported)


def test_the_first_that_works_is_selected_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    offered = [
        candidate("a", unsupported="runs elsewhere"),
        Candidate("b", "", lambda: missing("b"), package="b.interface"),
        candidate("c", fault="its output is off"),
        candidate("d"),
        candidate("e"),
    ]
    with caplog.at_level(logging.INFO):
        found = select("operation", offered)
    assert (found.name, found.reason, found.implementation) == ("d", "title of d", "d")
    assert found.rejected == ("a: runs elsewhere", "b: not installed", "c: installed but broken: its output is off")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "operation: c is installed but broken, so it is not used: its output is off"),
        ("INFO", "operation: d (title of d)"),
    ]


def test_a_missing_dependency_of_an_installed_package_is_a_fault() -> None:
    found = select("operation", [Candidate("b", "", lambda: missing("cutlass"), package="b"), candidate("d")])
    assert found.rejected == ("b: installed but broken: ModuleNotFoundError: No module named 'cutlass'",)


def test_a_requested_one_is_the_only_one_tried() -> None:
    found = select("operation", [candidate("a"), candidate("b")], prefer="b")
    assert (found.name, found.reason, found.rejected) == ("b", "requested", ())
    with pytest.raises(ValueError, match="no operation: a: installed but broken: wrong"):
        select("operation", [candidate("a", fault="wrong"), candidate("b")], prefer="a")


def test_an_interrupt_is_not_a_fault() -> None:
    def load() -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        select("operation", [Candidate("a", "", load), candidate("b")])


def test_first_line() -> None:
    assert first_line(RuntimeError("no compiler\n  File x")) == "RuntimeError: no compiler"
    assert first_line(ValueError()) == "ValueError: "
