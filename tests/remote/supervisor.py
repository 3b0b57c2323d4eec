"""`python -m tests.remote.supervisor DEADLINE < PLANE`: the supervisor with another deadline."""

from __future__ import annotations

import sys

from engine.remote.__main__ import supervise
from engine.remote.plane import Plane

if __name__ == "__main__":
    supervise(Plane.of_json(sys.stdin.readline()), deadline_s=float(sys.argv[1]))
