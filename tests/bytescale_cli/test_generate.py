"""`generate` parses, calls and prints; engine/trainer/generate.py has tests of its own."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from bytescale_cli.main import run
from bytescale_cli.output import say

FOUND = {"text": " x\n\ty \x1b[31m", "tokens": [1], "stopped": "tokens"}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A stand-in for the model that records its calls."""
    noted: list[Any] = []

    def generate(*arguments: object) -> dict[str, Any]:
        noted.append(arguments)
        return FOUND

    fake = types.ModuleType("engine.trainer.generate")
    fake.generate = generate  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "engine.trainer.generate", fake)
    return noted


def test_text(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "r", "--prompt", "a b"]) == 0
    assert capsys.readouterr().out == " x\n\ty \N{REPLACEMENT CHARACTER}[31m\n", "no code reaches the terminal"
    more = ["--tokens", "5", "--temperature", ".7", "--seed", "3", "--tokenizer", "bytes"]
    assert run(["generate", "r", "--prompt", "a b", *more, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "ok": True, "generate": FOUND}
    assert asked == [
        (Path("r"), "a b", 100, 0.0, 0, None, say),
        (Path("r"), "a b", 5, 0.7, 3, "bytes", say),
    ]
