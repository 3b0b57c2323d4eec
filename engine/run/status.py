"""The state of runs, read from their folders: progress, whether they are running, and how they differ."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config.keys import is_path
from engine.config.resolved import flat, read_resolved
from engine.config.schema import Config
from engine.errors import ConfigError
from engine.files import LOCK
from engine.run.cause import Cause
from engine.run.checkpoints import newest_first
from engine.run.folder import RunFolder
from engine.run.launches import STOPPED, read_launches
from engine.run.metrics import read_metrics
from engine.run.speed import Speed


@dataclass(frozen=True)
class Status:
    """The state of a run. Losses are those of its last finished step, speeds medians (speed.py); None before."""

    run: str
    state: str  # "running", "finished", "failed" or "stopped"
    recipe: str
    planner: str
    steps: int  # run.steps
    step: int
    loss: float | None
    validation_loss: float | None  # of the last step that was validated
    tokens: int  # of all steps
    tokens_per_s: float | None
    step_s: float | None
    mfu: float | None
    unsplit: float | None
    changed: float | None  # when the last step was finished, in seconds since 1970
    checkpoint: str | None  # the newest; not verified
    cause: str | None  # why the last start failed
    causes: dict[int, str]  # why ranks failed, as they wrote it; one that was killed wrote nothing
    warnings: list[str]  # files that are damaged


def status(run: Path) -> Status:
    """Read the state of a run. Raises ConfigError if `run` is not the folder of a run."""
    folder, config, warnings = RunFolder(run), config_of(run), list[str]()
    running = is_locked(folder.root / LOCK)
    lines = read_metrics(folder.metrics, warnings.append, growing=running)
    last: Mapping[str, Any] = lines[-1] if lines else {"step": 0}
    causes = {rank: cause.problem.message for rank, cause in _causes(folder)}
    starts = read_launches(folder.launches)
    outcome = starts[-1].outcome if starts else ""
    speed = Speed.of(lines, [one.step for one in starts])
    # A held lock means that the run is running. Metrics cannot show this: a step may take long.
    if running:
        state = "running"
    elif last["step"] >= config.run.steps or last.get("ended"):
        state = "finished"
    else:  # ranks that detected the end of others may have written causes in a start that was stopped on request
        state = "failed" if (outcome or causes) and outcome != STOPPED else "stopped"
    saved = newest_first(folder.checkpoints)
    return Status(
        str(run),
        state,
        config.recipe,
        config.planner.name,
        config.run.steps,
        last["step"],
        last.get("loss"),
        next((line["validation_loss"] for line in reversed(lines) if line.get("validation_loss") is not None), None),
        sum(line.get("tokens", 0) for line in lines),
        speed.tokens_per_s if speed else None,
        speed.step_s if speed else None,
        speed.mfu if speed else None,
        speed.unsplit if speed else None,
        folder.metrics.stat().st_mtime if lines else None,
        str(saved[0]) if saved else None,
        outcome or None if state == "failed" else None,
        causes if state == "failed" else {},
        warnings,
    )


def config_of(run: Path) -> Config:
    """Read the config of a run. Raises ConfigError if `run` is not the folder of a run."""
    path = RunFolder(run).resolved
    if not path.is_file():
        raise ConfigError("is not the folder of a run", key=str(run), hint="`bytescale runs list FOLDER` lists runs")
    return read_resolved(path)


def runs_in(folder: Path) -> list[Path]:
    """List the run folders in `folder`, the one that changed last first. Raises ConfigError if it does not exist.

    Folders that this user may not look into are listed too: each could be a run.
    """
    if not folder.is_dir():
        raise ConfigError("no such folder", key=str(folder), hint="name the folder that contains the runs")
    found = [path for path in folder.iterdir() if _may_be_run(path)]
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def _may_be_run(path: Path) -> bool:
    try:
        return RunFolder(path).resolved.is_file()
    except PermissionError:
        return True


def is_locked(path: Path) -> bool:
    """Return whether a process has locked a file, also one in another container or on another host.

    /proc/locks lists neither of these. So this takes a shared lock for a moment, for which `files.locked` waits.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # the file system has no locks
        return False
    finally:
        os.close(handle)
    return False


def _causes(folder: RunFolder) -> Iterator[tuple[int, Cause]]:
    """Yield the ranks that failed, and what they wrote about it, in the order in which they failed."""
    found = []
    for path in folder.logs.glob("rank-*.error.json"):
        number, cause = path.name.split("-")[1].split(".")[0], Cause.read(path)
        if number.isdecimal() and cause is not None:
            found.append((cause.time or 0.0, int(number), cause))
    yield from ((rank, cause) for _, rank, cause in sorted(found, key=lambda one: one[:2]))


def log_tail(run: Path, rank: int | None, count: int) -> list[dict[str, Any]]:
    """Return the last `count` lines of the log of a rank, or of every rank: [{"rank", "path", "lines"}, ...].

    If no rank has started, return the output of agents or ssh: [{"node", "path", "lines"}, ...]. Raises
    ConfigError if `run` is not the folder of a run, or has no log of that rank.
    """
    config_of(run)
    folder = RunFolder(run)
    ranks, nodes = (
        {int(path.stem.split("-")[1]): path for path in folder.logs.glob(f"{kind}-*.log")} for kind in ("rank", "node")
    )
    if rank is None:
        kind, chosen = ("rank", ranks) if ranks else ("node", nodes)
    elif rank in ranks:
        kind, chosen = "rank", {rank: ranks[rank]}
    else:
        numbers, last = sorted(ranks), max(ranks, default=0)
        listed = f"0 to {last}" if 0 < last < len(ranks) else ", ".join(map(str, numbers))
        hint = f"choose {listed}" if ranks else f"no rank has started; see `bytescale runs logs {run}`"
        raise ConfigError(f"{run} has no log of this rank", key=f"--rank {rank}", hint=hint)
    found = list[dict[str, Any]]()
    for number, path in sorted(chosen.items()):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        if lines or kind == "rank":
            found.append({kind: number, "path": str(path), "lines": lines[-count:]})
    return found


def differences(configs: Sequence[Config]) -> dict[str, list[Any]]:
    """Return the keys whose values differ between configs, with the value of each; run.out is left out.

    Two spellings of a path are no difference. A key that a config does not have is None there.
    """
    values = [flat(config.model_dump(mode="json")) for config in configs]
    found = {}
    for key in dict.fromkeys(key for one in values for key in one if key != "run.out"):
        of_key = [one.get(key) for one in values]
        meant = [os.path.realpath(one) if is_path(key) and isinstance(one, str) else one for one in of_key]
        if any(one != meant[0] for one in meant):
            found[key] = of_key
    return found


def losses(runs: Sequence[Path]) -> tuple[int | None, list[float | None]]:
    """Return the last step that all runs have a loss of, and their losses then; None without such a step."""
    by_step = [{line["step"]: line.get("loss") for line in read_metrics(RunFolder(run).metrics)} for run in runs]
    common = set.intersection(*(set(one) for one in by_step)) if by_step else set()
    step = max(common, default=None)
    return step, [None if step is None else one[step] for one in by_step]
