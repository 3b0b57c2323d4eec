"""Runs two ranks on this machine through an agent, as `train` does, with a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from engine.cluster.gpus import visible_gpus
from engine.config.load import load, resolved_yaml
from engine.doctor.check import Check, failed, ok, skipped
from engine.doctor.rank import ELEMENTS, PARTS, result
from engine.errors import BytescaleError
from engine.job import Job
from engine.launch.agents.commands import node_commands
from engine.launch.agents.ranks import PreemptedError, run_ranks
from engine.readers import read_object
from engine.run.folder import RunFolder

_LIMIT_S = 120.0  # importing torch from a network file system may take a minute; here it all takes 5 s
_RANKS = 2


class _TooLongError(BytescaleError):
    """The time limit has passed."""


def two_ranks(place: Path) -> list[Check]:
    """Let two ranks sum values and send them along a ring: with NCCL if there are two GPUs, else with gloo.

    `place` is an empty folder for their files. Raises KeyboardInterrupt if the user stopped them.
    """
    gpus = visible_gpus() >= _RANKS
    folder, backend = RunFolder(place), "NCCL" if gpus else "gloo"
    cluster = "h100x8" if gpus else "local"  # of which ranks use only whether it has GPUs
    config = load([f"cluster={cluster}", f"cluster.ranks_per_node={_RANKS}", f"run.out={place}"])
    folder.logs.mkdir()
    folder.resolved.write_text(resolved_yaml(config), encoding="utf-8")
    module = ("engine.doctor.rank", str(place))
    commands = node_commands(Job(config), folder, None, module=module)
    why = ""
    try:
        run_ranks(commands, folder, _limit(), lambda line: None)
    except PreemptedError:
        raise KeyboardInterrupt from None
    except BytescaleError as error:
        (problem, *_) = error.problems
        why = problem.message
    return [_check(folder, part, backend, why) for part in PARTS]


def _check(folder: RunFolder, part: str, backend: str, why: str) -> Check:
    """Read what became of a part. After the one that failed, all are skipped."""
    if result(folder, part).exists():
        seconds = read_object(result(folder, part))["seconds"]
        what = f"{_RANKS} ranks with {backend}, {4 * ELEMENTS / 2**20:.0f} MiB in {1e3 * seconds:.2g} ms"
        return ok(part, what, f"{backend}, {1e3 * seconds:.2g} ms")
    done = [one for one in PARTS if result(folder, one).exists()]
    if part != PARTS[len(done)]:
        return skipped(part, f"{PARTS[len(done)]} failed")
    hint = f"check for a firewall between processes of this machine; the logs of both ranks are in {folder.logs}"
    return failed(part, f"{_RANKS} ranks with {backend}: {why}", hint, f"{backend} failed")


def _limit() -> Callable[[], None]:
    """Return a function that raises _TooLongError once the time is up."""
    last = time.monotonic() + _LIMIT_S

    def tick() -> None:
        if time.monotonic() > last:
            raise _TooLongError(f"they have not finished in {_LIMIT_S:.0f} s")

    return tick
