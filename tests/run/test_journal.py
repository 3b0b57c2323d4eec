from __future__ import annotations

import errno
import threading
import time

import pytest

from engine.run import journal
from engine.run.journal import Journal


def test_functions_run_in_order_in_one_thread_while_the_caller_goes_on() -> None:
    go, order = threading.Event(), list[int]()
    written = Journal(most=3)

    def write(number: int) -> None:
        assert go.wait(20)
        order.append(number)

    for number in range(3):
        written.add(lambda number=number: write(number))
    written.check()
    assert order == [], "nothing waits yet"
    timer = threading.Timer(0.2, go.set)
    timer.start()
    written.add(lambda: write(3))  # the fourth waits for the first
    assert go.is_set() and order[0] == 0
    written.wait()
    assert order == [0, 1, 2, 3]


@pytest.mark.parametrize("how", ["check", "add", "wait"])
def test_an_error_is_raised_and_nothing_is_written_after_it(how: str) -> None:
    """Again at each call: a checkpoint after it would be newer than the metrics."""
    written, order = Journal(), list[str]()

    def full() -> None:
        order.append("full")
        raise OSError(errno.ENOSPC, "No space left on device")

    written.add(full)
    written._behind[0].exception(20)
    calls = {"check": written.check, "add": lambda: written.add(lambda: order.append("later")), "wait": written.wait}
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            calls[how]()
    assert order == ["full"]


def test_what_follows_a_failed_function_in_the_queue_is_not_run() -> None:
    """Otherwise the metrics would have a step that is not in the ledger."""
    go, written, order = threading.Event(), Journal(), list[str]()

    def fails() -> None:
        assert go.wait(20)
        raise OSError(errno.EIO, "Input/output error")

    written.add(fails)
    written.add(lambda: order.append("later"))
    go.set()
    with pytest.raises(OSError, match="Input/output error"):
        written.wait()
    written.leave()
    assert order == []


def test_a_run_that_fails_waits_for_what_is_behind_but_not_for_a_disk_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go, written, order = threading.Event(), Journal(), list[str]()

    def slow() -> None:
        time.sleep(0.1)
        order.append("a")

    def hangs() -> None:
        assert go.wait(20)
        order.append("b")

    written.add(slow)
    written.leave()
    assert order == ["a"]
    monkeypatch.setattr(journal, "_LEAVE_S", 0.1)
    written.add(hangs)
    written.leave()
    assert order == ["a"]
    go.set()
    written.wait()
    assert order == ["a", "b"]
