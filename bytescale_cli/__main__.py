"""`python -m bytescale_cli`: the command where the script is not on the PATH."""

import sys

# Python looks for modules in the working directory first, where a user may have another `engine` or `typing`.
first = None if getattr(sys.flags, "safe_path", False) else sys.path.pop(0)

from pathlib import Path  # noqa: E402

if first is not None and Path(first).samefile(Path(__file__).parents[1]):  # our checkout: nothing is installed
    sys.path.insert(0, first)

from bytescale_cli.start import start  # noqa: E402

sys.exit(start())
