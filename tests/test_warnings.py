"""Users may run Python with warnings as errors; what a library warns of must not end a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = "import engine.errors, warnings\nfor kind in ({}): warnings.warn('odd', kind)\nprint('went on')"


@pytest.mark.parametrize(
    ("options", "kinds", "code"),
    [
        (["-W", "error"], "UserWarning, DeprecationWarning", 0),
        (["-W", "error::DeprecationWarning"], "UserWarning, DeprecationWarning", 0),
        ([], "UserWarning, DeprecationWarning", 0),
    ],
)
def test_a_warning_is_no_error(options: list[str], kinds: str, code: int) -> None:
    command = [sys.executable, *options, "-c", PROGRAM.format(kinds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent.parent)
    assert (done.returncode, done.stdout) == (code, "went on\n")
    assert "UserWarning: odd" in done.stderr


def test_here_they_are_errors() -> None:
    import warnings

    with pytest.raises(UserWarning):
        warnings.warn("odd", UserWarning, stacklevel=1)
