"""Whether this host can run ranks at all. Without these checks they would fail in libraries, with other words, or wait.

The launcher checks its own host before anything is written, and each agent its own before it starts ranks. How much a
host should allow, `bytescale doctor` says (engine/doctor/limits.py); here are limits below which no run starts.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from engine.cluster.available_memory import CGROUPS, PROC, own_groups
from engine.errors import Problem
from engine.launch.checks.interface import GLOO, NCCL, interface_problem, loopback_problem

_FILES = 1 << 16  # open at once: two for each node
_FEWEST_FILES = 64  # of a rank, its planning process or the launcher, besides connections
_FEWEST_THREADS = 8  # of a rank and its planning process
# Of a rank to each other one, by whether it uses GPUs: one for each group of gloo. NCCL connects to few ranks, and the
# first rank has no socket to every other one: PyTorch's store goes over the agents (engine/parallel/store.py).
SOCKETS = {True: 0, False: 2}


class Need(NamedTuple):
    """What decides how much a host must allow."""

    ranks: int  # on this host
    world: int  # ranks of all hosts
    nodes: int
    gpus: bool
    ray: int = 0  # bytes of /dev/shm for Ray's objects; 0 without Ray


def unready(need: Need, variables: Mapping[str, str]) -> Problem | None:
    """Return why no rank with these variables can run on this host; None if nothing is in the way."""
    used = [name for name, uses in ((GLOO, not need.gpus or need.nodes > 1), (NCCL, need.gpus)) if uses]
    named = interface_problem({name: variables[name] for name in used if name in variables})
    if named or need.world == 1:  # a single rank connects to no other
        return named or _limit_problem(need)
    if need.nodes == 1 and (problem := loopback_problem()):
        return problem
    return _limit_problem(need)


def _limit_problem(need: Need) -> Problem | None:
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = _FEWEST_FILES + SOCKETS[need.gpus] * need.world
    if files != resource.RLIM_INFINITY and files < least:
        message = f"a process may open {files} files, but a rank of {need.world:,} needs {least:,} or more"
        return Problem(
            message, "ulimit -n", f"`ulimit -n {16 * least}`, or let an administrator raise the limit nofile"
        )
    threads, least = most_threads(), _FEWEST_THREADS * need.ranks
    if threads is not None and threads < least:
        message = f"{threads} threads may be started, but {need.ranks} ranks need {least} or more"
        return Problem(message, "ulimit -u", "raise it, or pids.max of the container (docker run --pids-limit)")
    return None


def most_threads() -> int | None:
    """Return how many more threads may run, by the limit of the user, which root does not have, and of the container.

    None if there is no limit. Threads that the user runs already count, but their number is not known.
    """
    user = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    allowed = [] if os.geteuid() == 0 or user == resource.RLIM_INFINITY else [user]
    for group in own_groups(PROC, CGROUPS, "pids"):
        with suppress(OSError, ValueError):  # the root group has no such files, and "max" means no limit
            most, now = (int((group / name).read_text()) for name in ("pids.max", "pids.current"))
            allowed.append(max(0, most - now))
    return min(allowed, default=None)


def allow_many_files() -> None:
    """Let this process open more files than the usual 1,024, as far as its hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
