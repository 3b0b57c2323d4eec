"""What run folders say about their runs: how far they are, whether they are going on, and how they differ."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config.keys import is_path
from engine.config.resolved import flat, read_resolved
from engine.config.schema import Config
from engine.errors import ConfigError, RunFolderError
from engine.files import LOCK
from engine.run.checkpoints import newest_first
from engine.run.folder import RunFolder
from engine.run.metrics import read_metrics

_LOCKS = Path("/proc/locks")


@dataclass(frozen=True)
class Status:
    """The state of a run. Figures are those of its last finished step, None before the first."""

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
    changed: float  # when the last step was finished, in seconds since 1970
    checkpoint: str | None  # the newest; not verified
    causes: dict[int, str]  # why ranks failed


def status(run: Path) -> Status:
    """Read the state of a run. Raises ConfigError if `run` is not the folder of a run."""
    folder, config = RunFolder(run), config_of(run)
    lines = read_metrics(folder.metrics)
    last: Mapping[str, Any] = lines[-1] if lines else {"step": 0}
    causes = {rank: cause["message"] for rank, cause in _causes(folder)}
    ended = last["step"] >= config.run.steps or last.get("ended")
    going_on = is_locked(folder.root / LOCK)
    state = "running" if going_on else "finished" if ended else "failed" if causes else "stopped"
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
        last.get("tokens_per_s"),
        (folder.metrics if lines else folder.resolved).stat().st_mtime,
        str(saved[0]) if saved else None,
        {} if going_on or ended else causes,
    )


def config_of(run: Path) -> Config:
    """Read the config of a run. Raises ConfigError if `run` is not the folder of a run."""
    path = RunFolder(run).resolved
    if not path.is_file():
        raise ConfigError("is not the folder of a run", key=str(run), hint="`bytescale runs list FOLDER` lists runs")
    return read_resolved(path)


def runs_in(folder: Path) -> list[Path]:
    """List the run folders in `folder`, the one that changed last first. Raises ConfigError if it does not exist."""
    if not folder.is_dir():
        raise ConfigError("no such folder", key=str(folder), hint="name the folder in which your runs are")
    found = [path for path in folder.iterdir() if RunFolder(path).resolved.is_file()]
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def is_locked(path: Path) -> bool:
    """Return whether a process of this machine has locked a file. Does not lock it itself: a run could be starting."""
    try:
        found = path.stat()
        place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        return any(place in line.split() for line in _LOCKS.read_text().splitlines())
    except OSError:
        return False


def _causes(folder: RunFolder) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the ranks that failed, and what they wrote about it, in the order in which they failed."""
    found = []
    for path in folder.logs.glob("rank-*.error.json"):
        try:
            cause = json.loads(path.read_text(encoding="utf-8"))
            found.append((float(cause.get("time", 0)), int(path.name.split("-")[1].split(".")[0]), cause))
        except (OSError, ValueError, AttributeError):
            continue  # half written
    yield from ((rank, {"message": ""} | cause) for _, rank, cause in sorted(found, key=lambda one: one[:2]))


def log_tail(run: Path, rank: int | None, count: int) -> list[dict[str, Any]]:
    """Return the last `count` lines of the log of a rank, or of every rank: [{"rank", "path", "lines"}, ...].

    Raises ConfigError if `run` is not the folder of a run, and RunFolderError if there is no such log.
    """
    config_of(run)
    folder, found = RunFolder(run), list[dict[str, Any]]()
    numbers = sorted(int(path.stem.split("-")[1]) for path in folder.logs.glob("rank-*.log"))
    for number in numbers if rank is None else [rank]:
        path = folder.log(number)
        if not path.is_file():
            listed = f"it has those of {len(numbers):,} ranks, from 0" if numbers else "no rank of it has started here"
            raise RunFolderError(f"has no log of rank {number}", key=str(run), hint=listed)
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        found.append({"rank": number, "path": str(path), "lines": lines[-count:]})
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
