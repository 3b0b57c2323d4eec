"""SIGKILL and SIGSTOP of all parts of the data plane on Ray, at random moments of the steps of 2 hosts with 4 ranks.

`python benchmarks/ray_faults.py [--moments N] [--roles NAME ...]` prints a table: arrays of all ranks that differ from
the local runtime, seconds until a fault was known, the longest step, processes that are left. head is the server of
Ray's head (GCS); node-0 and node-1 are all processes of Ray on a host, with its actors and its standby, with the head
and without. Then: late answers of an actor that could not be killed, and what a planner needs that takes the role
between two checkpoints.

A target is missed if an array differs, a process is left or stopped, SIGKILL is seen later than after .5 s, SIGSTOP
later than .5 s after the deadline (agents and guards look at the supervisor and the head, after 3 s), or a step takes
more than 5 s longer than the deadline although there is a warm standby. Times need a machine that is not busy.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))

from engine.control.processes import is_stopped
from engine.data.runtime.process import PlanningProcess
from tests.remote.conforming import OverRay
from tests.remote.harm import HARMED, Rig, Struck, a_run, limit_s
from tests.remote.trio import DEADLINE_S

_STEP_S = DEADLINE_S + 5
_CHECKPOINT_EVERY = 10  # steps


def line(role: str, how: signal.Signals, struck: list[Struck]) -> bool:
    """Print a row of the table; return whether all targets are met."""
    differ, left = sum(one.differ for one in struck), sum(one.left for one in struck)
    seen, longest = [one.seen_s for one in struck], [one.longest_s for one in struck]
    met = not differ and not left and max(seen) <= limit_s(role, how)
    standby = not role.startswith("node")
    met &= max(longest) <= _STEP_S or not standby
    times = f"{median(seen):7.2f} {max(seen):6.2f} {median(longest):9.2f} {max(longest):6.2f}"
    said = ("ok" if met else "MISSED") + ("" if standby else ", no standby is left")
    print(f"{role:11}{how.name:9}{len(struck):7}{differ:8}{times}{left:6}  {said}", flush=True)
    return met


def main() -> int:
    """Return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=4)
    parser.add_argument("--roles", nargs="*", default=HARMED, choices=HARMED)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        with a_run(Path(name)) as rig:
            met = measure(rig, chosen.roles, chosen.moments)
            below = [one for host in (0, 1) for one in rig.agents.ray(host)]
            stopped = sum(is_stopped(one.pid) for one in below)
        left = sum(one.is_running() for one in below)
    print(f"at the end: {stopped} processes are stopped, {left} of {len(below)} are left")
    return 0 if met and not stopped and not left else 1


def measure(rig: Rig, roles: list[str], moments: int) -> bool:
    """Harm each role with each signal; return whether all targets are met."""
    differ = rig.take(5)
    print("                           arrays  seen, s        longest step, s")
    print("role       signal   moments differ median    max    median    max  left")
    signals = (signal.SIGKILL, signal.SIGSTOP)
    met = [line(role, how, list(rig.harm(role, how, moments))) for role in roles for how in signals]
    print(f"{len(rig.seconds)} steps, median {1000 * median(rig.seconds):.0f} ms", flush=True)
    met += [refused(moments), taken_over(rig, moments)]
    return all(met) and not differ


def refused(moments: int) -> bool:
    """Print how many late answers of actors that were replaced, but could not be killed, were refused."""
    with closing(PlanningProcess(OverRay)) as process:
        found = 0
        for _ in range(moments):
            process.ask(OverRay.late)
            done, answer = process.answer()
            if not done:
                raise answer
            found += answer[2]
    print(f"late answers refused: {found} of {moments}", flush=True)
    return found == moments


def taken_over(rig: Rig, moments: int) -> bool:
    """Print what planners needed that took the role between two checkpoints; return whether none planned again."""
    found = [rig.take_over(1 + number % (_CHECKPOINT_EVERY - 1)) for number in range(moments)]
    for one in found:
        print(
            f"planner killed {one.since} steps after a checkpoint: state {one.cursor} bytes (the cursor asked for), "
            f"{one.lengths:,} bytes of lengths from hosts, {one.again} steps planned again, {one.differ} arrays differ",
            flush=True,
        )
    return not any(one.again or one.differ for one in found)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads of a test that failed may still wait
