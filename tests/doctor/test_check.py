from __future__ import annotations

from engine.doctor.check import Check, Checks, ok, skipped, warning
from engine.errors import PreflightError


def broken() -> Check:
    raise ZeroDivisionError("division\nby zero")


def refused() -> Check:
    raise PreflightError("there is no GPU", hint="use another machine")


def test_a_check_that_crashes_is_a_failed_check_and_the_others_still_run() -> None:
    checks = Checks()
    assert not checks.add("system", "first", broken)
    assert checks.add("network", "second", ok, "second", "works", "yes")
    first, second = checks.found
    assert (first.name, first.section, first.state) == ("first", "system", "failed")
    assert first.message == "the check itself failed: ZeroDivisionError: division by zero"
    assert first.hint is not None and "report" in first.hint
    assert second == Check("second", "ok", "works", "yes", section="network")


def test_an_error_of_ours_keeps_its_hint() -> None:
    checks = Checks()
    checks.add("devices", "GPUs", refused)
    assert checks.found == [Check("GPUs", "failed", "there is no GPU", None, "use another machine", "devices")]


def test_a_function_may_return_several_checks() -> None:
    checks = Checks()
    assert checks.add("network", "both", lambda: [skipped("a", "no"), warning("b", "slow", "wait")])
    assert [(check.name, check.section) for check in checks.found] == [("a", "network"), ("b", "network")]
