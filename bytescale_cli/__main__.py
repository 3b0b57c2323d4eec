"""`python -m bytescale_cli`: the command where the script is not on the PATH."""

import sys

from bytescale_cli.main import run

sys.exit(run())
