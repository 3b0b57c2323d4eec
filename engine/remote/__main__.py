"""The supervisor of the data plane on Ray, which the agent of the first node starts, and starts again if it ends.

    python -m engine.remote < PLANE

Its standard input has one line, a `Plane`, and stays open as long as the agent runs. It logs to its standard error.
"""

from __future__ import annotations

import sys

from engine.remote.plane import Plane


def main() -> None:
    """Run until the agent of the first node ends."""
    plane = Plane.of_json(sys.stdin.readline())
    print(f"{plane.folder}: a data plane on {len(plane.hosts)} hosts", file=sys.stderr, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
