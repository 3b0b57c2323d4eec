"""Ctrl-C ends a command as an interruption wherever it arrives: no library replaces it, loses it, or crashes of it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

from bytescale_cli.main import run
from bytescale_cli.start import start
from engine import interrupts
from engine.launch.agents.ranks import run_ranks
from engine.launch.copies import copies
from engine.launch.outcome import write_page
from engine.run.folder import RunFolder
from engine.run.metrics import append
from engine.run.remote import Remote


@pytest.fixture(autouse=True)
def _unanswered() -> Iterator[None]:
    """No signal of a test is left for the next one."""
    yield
    interrupts.answered()


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def replaced(*_: object, **__: object) -> None:
    """As OmegaConf, whose clean-up fails on what Ctrl-C has left half done."""
    try:
        press()
    finally:
        raise AttributeError("'NoneType' object has no attribute '_invalidate_flags_cache'")


def in_c(*_: object, **__: object) -> None:
    """As the C interface of Python, which reports an exception beside a result."""
    try:
        press()
    except KeyboardInterrupt:
        raise SystemError("returned a result with an exception set") from None


def ignored(*_: object, **__: object) -> None:
    """As a finalizer, whose exceptions are printed as ignored."""

    class Resource:
        def __del__(self) -> None:
            press()

    Resource()
    time.sleep(30)


def lost(*_: object, **__: object) -> list[str]:
    with suppress(KeyboardInterrupt):
        press()
    return []


@pytest.mark.parametrize("load", [replaced, in_c, ignored])
def test_an_interruption_stays_one(
    load: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.config.load.load", load)
    started = time.monotonic()
    assert run(["plan"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert time.monotonic() - started < 20
    interrupts.check()


def test_a_command_that_lost_it_has_no_result(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.run.status.runs_in", lost)
    assert run(["runs", "list", str(tmp_path)]) == 130
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "interrupted\n")


def test_ranks_do_not_start_after_a_lost_one(tmp_path: Path) -> None:
    with interrupts.raised():
        lost()
        with pytest.raises(KeyboardInterrupt):
            run_ranks([], RunFolder(tmp_path), lambda: None, lambda line: None)


def test_none_is_raised_in_llvmlite() -> None:
    """LLVM would use the result of the callback that did not return one."""
    module = {"press": press, "done": [], "__name__": "llvmlite.binding.executionengine"}
    exec("def callback():\n    press()\n    done.append(True)", module)
    callback = module["callback"]
    assert callable(callback)
    with interrupts.raised(), pytest.raises(KeyboardInterrupt):
        callback()
        assert module["done"] == [True]
        time.sleep(30)
    assert module["done"] == [True]


def test_the_next_command_begins_without_it(tmp_path: Path) -> None:
    with interrupts.raised():
        lost()
    assert run(["runs", "list", str(tmp_path)]) == 0


def test_handlers_are_those_of_before() -> None:
    def kept(number: int, frame: object) -> None:
        pass

    before = signal.signal(signal.SIGUSR1, kept)
    try:
        with interrupts.raised():
            assert signal.getsignal(signal.SIGUSR1) == kept
            assert signal.getsignal(signal.SIGINT) == interrupts.handle
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(("before", "within"), [("default_int_handler", "SIG_DFL"), ("SIG_IGN", "SIG_IGN")])
def test_ctrl_c_during_imports_has_no_traceback(before: str, within: str, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = ModuleType("bytescale_cli.main")
    monkeypatch.setattr(commands, "run", lambda: signal.getsignal(signal.SIGINT) == getattr(signal, within), False)
    monkeypatch.setitem(sys.modules, "bytescale_cli.main", commands)
    own = signal.signal(signal.SIGINT, getattr(signal, before))
    try:
        assert start()
    finally:
        signal.signal(signal.SIGINT, own)


def test_a_report_that_is_interrupted_leaves_the_outcome_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, said = RunFolder(tmp_path), list[str]()
    append(folder.metrics, {"step": 1})
    monkeypatch.setattr("engine.report.run_page.write_report", replaced)
    with interrupts.raised():
        assert write_page(folder, said.append) is None
        interrupts.check()
    assert f"bytescale report {tmp_path}" in said[0]


def test_copies_that_are_interrupted_leave_the_outcome_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def joined(self: threading.Thread, timeout: float | None = None) -> None:
        if self.name == "copies" and timeout is not None:
            monkeypatch.undo()
            press()

    remote = Remote(f"file://{tmp_path}/remote")
    with interrupts.raised(), copies(tmp_path, remote, 0, lambda line: None):
        monkeypatch.setattr(threading.Thread, "join", joined)
    interrupts.check()
