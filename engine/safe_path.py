"""Child processes must not import modules from the user's working directory, such as a folder named `engine`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HOME = Path(__file__).parent.parent  # the folder that contains this package


def safe_path() -> dict[str, str]:
    """Return environment variables that keep a child Python process from importing from its working directory.

    Empty if the working directory is our checkout: if the package is not installed, it can only be imported from there.
    Python 3.10 ignores PYTHONSAFEPATH, so there a user's folder `engine/` hides ours.
    """
    return {} if _HOME.samefile(os.curdir) else {"PYTHONSAFEPATH": "1"}


@contextmanager
def starting_safely() -> Iterator[None]:
    """Let processes that are started in this context inherit `safe_path`: multiprocessing has no argument for it."""
    before = {name: os.environ.get(name) for name in safe_path()}
    os.environ.update(safe_path())
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
