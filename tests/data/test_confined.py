"""What takes too much memory or time, or ends its process, is an error of the data, and the next call works."""

from __future__ import annotations

import os
import resource
import signal
import time

import pytest

from engine.data import confined
from engine.data.confined import call
from engine.errors import DataError, Problem
from tests.refusals import refused


@pytest.fixture(autouse=True, scope="module")
def started_here() -> None:
    """End a process that an earlier test file has started: in its working directory, `tests` may not be found."""
    if process := confined._processes.pop(os.getpid(), None):
        process.close()


def ends_with(code: int) -> None:
    os._exit(code)


def is_killed(number: int) -> None:
    os.kill(os.getpid(), number)


def fills_memory(count: int) -> int:
    return len(b"x" * count)


def loops() -> None:
    while True:
        pass


def calls_itself() -> None:
    calls_itself()


def refuses() -> None:
    raise DataError("no", key="a", hint="b")


def fails() -> None:
    raise SystemExit(3)  # as panics of Rust libraries, no Exception


def gives_no_json() -> set[int]:
    return {1}


BAD = {
    "memory": (fills_memory, (10**10,), "memory"),
    "time": (loops, (), "processor time"),
    "calls": (calls_itself, (), "calls itself"),
    "exit": (ends_with, (7,), "exit code 7"),
    "crash": (is_killed, (signal.SIGSEGV,), "SIGSEGV"),
    "killed": (is_killed, (signal.SIGKILL,), "memory of this host"),
    "panic": (fails, (), "SystemExit"),
    "type": (len, (3,), "TypeError"),
    "result": (gives_no_json, (), "TypeError"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_goes_wrong_is_an_error_of_the_data(name: str) -> None:
    function, arguments, why = BAD[name]
    with refused(DataError, "here") as problems:
        call(function, *arguments, what="it", hint="mend it", seconds=0.2, key="here")  # type: ignore[arg-type]
    assert why in problems[0].message and problems[0].hint == "mend it"
    assert call(fills_memory, 10, what="", hint="") == 10


def test_errors_of_the_data_pass() -> None:
    with pytest.raises(DataError) as caught:
        call(refuses, what="", hint="")
    assert caught.value.problems == (Problem("no", "a", "b"),)


def test_one_process_serves_all_calls_and_ends_with_them() -> None:
    first = call(os.getpid, what="", hint="")
    assert first == call(os.getpid, what="", hint="") != os.getpid()
    confined._processes.pop(os.getpid()).close()
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    assert call(os.getpid, what="", hint="") != first


def test_time_is_that_of_one_call() -> None:
    """Ten calls of .1 s do not add up to more than .5 s."""
    for _ in range(10):
        call(takes, 0.1, what="", hint="", seconds=0.5)


def takes(seconds: float) -> None:
    start = time.process_time()
    while time.process_time() - start < seconds:
        pass


def test_a_limit_of_the_user_stays() -> None:
    """`ulimit -v` may be lower than what we allow."""
    soft, hard = call(resource.getrlimit, int(resource.RLIMIT_AS), what="", hint="")
    assert soft > confined.MEMORY
    assert hard == resource.getrlimit(resource.RLIMIT_AS)[1]
