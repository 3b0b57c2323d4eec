from __future__ import annotations

import sys

import pytest

from bytescale_cli.progress import describe, progress

LINE = {"step": 3, "loss": 2.5, "tokens_per_s": 12345.6, "balance": 0.9, "max_degree": 2}


def test_describe() -> None:
    assert describe(LINE) == "loss 2.500  12,346 tokens/s  plan balance 0.90  largest ring 2"
    new = describe(LINE | {"mfu": 0.4123, "unsplit": 0.831})
    assert new == "loss 2.500  12,346 tokens/s  MFU 41.2%  plan balance 0.90  largest ring 2  unsplit 83%"
    assert describe(LINE | {"mfu": None, "unsplit": 1.0}).endswith(
        "tokens/s  plan balance 0.90  largest ring 2  unsplit 100%"
    )
    skipped = describe({**LINE, "loss": None, "skipped": 1})
    assert skipped == "loss not finite  12,346 tokens/s  plan balance 0.90  largest ring 2  skipped"


def test_plain_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(10) as (say, on_step):
        say("starting")
        on_step(LINE)
    captured = capsys.readouterr()
    assert captured.err.splitlines() == ["starting", f"step 3/10  {describe(LINE)}"]
    assert captured.out == ""


def test_a_live_line_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are plain text: a path in square brackets is not markup."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "160")
    with progress(10) as (say, on_step):
        say("[runs/a]")
        on_step(LINE)
    captured = capsys.readouterr()
    assert "[runs/a]" in captured.err
    assert "largest ring 2" in captured.err
    assert captured.out == ""


def test_a_line_is_whole_at_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    line = LINE | {"step": 123456, "tokens_per_s": 1234567.8, "validation_loss": 2.468}
    with progress(1234567) as (_, on_step):
        on_step(line)
    shown = capsys.readouterr().err
    assert "…" not in shown and "1,234,568 tokens/s" in shown and "123456/1234567" in shown and "2.468" in shown


def test_a_dumb_terminal_gets_plain_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "160")
    with progress(10) as (_, on_step):
        on_step(LINE)
    assert capsys.readouterr().err == f"step 3/10  {describe(LINE)}\n"
