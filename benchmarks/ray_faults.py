"""SIGKILL and SIGSTOP of each role of the data plane on Ray, at random moments of the steps of 2 hosts with 4 ranks.

`python benchmarks/ray_faults.py [--moments N] [--roles NAME ...]` prints a table: arrays of all ranks that differ from
the local runtime, seconds until the supervisor knew, the longest step, processes that are left. A target is missed if
an array differs, a process is left, SIGKILL is seen later than after .5 s, SIGSTOP later than .5 s after the deadline,
or a step takes more than 5 s longer than the deadline. Times need a machine that is not busy.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.remote import cluster
from tests.remote.harm import HARMED, Rig, Struck, a_run
from tests.remote.trio import DEADLINE_S

_SIGNALS = {signal.SIGKILL: 0.5, signal.SIGSTOP: DEADLINE_S + 0.5}  # seconds until each must be seen
_STEP_S = DEADLINE_S + 5


def line(role: str, how: signal.Signals, struck: list[Struck]) -> bool:
    """Print a row of the table; return whether all targets are met."""
    differ, left = sum(one.differ for one in struck), sum(one.left for one in struck)
    seen, longest = [one.seen_s for one in struck], [one.longest_s for one in struck]
    met = not differ and not left and max(seen) <= _SIGNALS[how] and max(longest) <= _STEP_S
    times = f"{median(seen):7.2f} {max(seen):6.2f} {median(longest):9.2f} {max(longest):6.2f}"
    print(f"{role:11}{how.name:9}{len(struck):7}{differ:8}{times}{left:6}  {'ok' if met else 'MISSED'}", flush=True)
    return met


def main() -> int:
    """Return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=4)
    parser.add_argument("--roles", nargs="*", default=HARMED, choices=HARMED)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with cluster.running(folder), a_run(folder) as rig:
            met = measure(rig, chosen.roles, chosen.moments)
    return 0 if met else 1


def measure(rig: Rig, roles: list[str], moments: int) -> bool:
    """Harm each role with each signal; return whether all targets are met."""
    differ = rig.take(5)
    print("                           arrays  seen, s        longest step, s")
    print("role       signal   moments differ median    max    median    max  left")
    met = [line(role, how, list(rig.harm(role, how, moments))) for role in roles for how in _SIGNALS]
    refused = sum(rig.state(role)["refused"] for role in ("planner", "host-0", "host-1"))
    steps = len(rig.seconds)
    print(f"{steps} steps, median {1000 * median(rig.seconds):.0f} ms; late answers refused: {refused}", flush=True)
    return all(met) and not differ


if __name__ == "__main__":
    sys.exit(main())
