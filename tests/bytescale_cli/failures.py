"""Commands that fail: their exit code and the places of their errors. What they say is in tests/mistakes/."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bytescale_cli.main import run


def failed(capsys: pytest.CaptureFixture[str], words: Sequence[str], code: int, *keys: str | Path) -> dict[str, Any]:
    """Run a command with `--json`, assert its exit code and the keys of its errors in order, and return its answer."""
    capsys.readouterr()
    found = run([*words, "--json"])
    assert found == code, found
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (answer["ok"], answer["error"]["code"]) == (False, code)
    places = [error["key"] for error in answer["errors"]]
    assert places == [str(key) for key in keys], places
    return answer
