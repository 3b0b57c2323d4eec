"""Runs a benchmark as its command line does, in this process."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from types import ModuleType
from typing import Any
from unittest.mock import patch

from benchmarks import driver


def measured(benchmark: ModuleType, *words: str) -> dict[str, Any]:
    """Run a benchmark with these words of a command line; return its JSON."""
    parts = {name: getattr(benchmark, name) for name in ("options", "summary") if hasattr(benchmark, name)}
    printed = io.StringIO()
    with patch.object(sys, "argv", ["benchmark.py", *words, "--json"]), contextlib.redirect_stdout(printed):
        driver.main(benchmark.__doc__, benchmark.cases, **parts)
    found: dict[str, Any] = json.loads(printed.getvalue())
    return found
