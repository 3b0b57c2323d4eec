"""Users may run Python with warnings as errors; what a library warns of must not end a run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.root import ROOT

pytestmark = pytest.mark.long

CHILD = "import warnings; warnings.warn('odd', DeprecationWarning); print('child')"
PROGRAM = f"""
import os, subprocess, sys, warnings
from bytescale_cli.main import run
before = [*warnings.filters], [*sys.warnoptions]
import engine.errors, engine.data.workers
assert before == ([*warnings.filters], [*sys.warnoptions]), "an import changes nothing"
run(["--version"])
for kind in (UserWarning, DeprecationWarning):
    warnings.warn("odd", kind)
subprocess.run([sys.executable, *subprocess._args_from_interpreter_flags(), "-c", {CHILD!r}], check=True)
"""


@pytest.mark.parametrize(
    ("options", "variable"),
    [
        (["-W", "error"], None),
        (["-W", "error::DeprecationWarning"], None),
        ([], "ignore::ImportWarning,error"),
        ([], None),
    ],
)
def test_a_warning_is_no_error(options: list[str], variable: str | None) -> None:
    """Nor in a process that is started as `multiprocessing` does. Imports do not change the options."""
    environment = {**os.environ, **({"PYTHONWARNINGS": variable} if variable else {})}
    command = [sys.executable, *options, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0 and done.stdout.endswith("child\n"), done.stderr
    assert "UserWarning: odd" in done.stderr


def test_here_they_are_errors() -> None:
    import warnings

    with pytest.raises(UserWarning):
        warnings.warn("odd", UserWarning, stacklevel=1)
