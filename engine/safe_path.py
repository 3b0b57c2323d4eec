"""What a user's working directory holds is not ours: no process that we start takes its modules from there."""

from __future__ import annotations

import os
from pathlib import Path

_HOME = Path(__file__).parent.parent  # where the packages of this process lie


def safe_path() -> dict[str, str]:
    """Return the environment in which a Python process looks for no module in the directory that it is started in.

    There is nothing to set where that directory is our own, a checkout that nobody installed: it may be the only way
    to us. Python 3.10 does not know the variable, and a folder `engine/` of the user's comes before ours there.
    """
    return {} if _HOME.samefile(os.curdir) else {"PYTHONSAFEPATH": "1"}
