"""Before any rank starts: the run folder is ours and is this config's, the documents are the same, the steps fit."""

from __future__ import annotations

import fcntl
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from engine.config.load import diff, read_resolved, resolved_yaml
from engine.config.schema import Config
from engine.data.index import Index, build_index, check_fingerprint
from engine.data.steps import Cursor, next_step
from engine.errors import ConfigError, RunFolderError
from engine.files import write_durably
from engine.planner.make import PlanSettings, plan_step
from engine.planner.plan import StepPlan
from engine.planner.ways import ways_out
from engine.trainer import checkpoint as checkpoints
from engine.trainer import metrics, saved
from engine.trainer.checkpoint import TrainState, newest_first
from engine.trainer.folder import RunFolder, write_json
from engine.trainer.lineage import check_lineage

Say = Callable[[str], None]
_OTHER = "name another run.out, or take the change back"


@dataclass(frozen=True)
class Start:
    """How a run would start: from which checkpoint, if any, with which documents, and the plans of its next steps."""

    checkpoint: Path | None
    state: TrainState | None  # of the checkpoint
    index: Index
    plans: tuple[StepPlan, ...]  # none if all steps are done

    @property
    def step(self) -> int:
        """Return how many steps are done."""
        return self.state.step if self.state else 0

    def outlook(self, config: Config) -> str:
        """Return from where it goes on, or, if nothing is left to train, how to train longer."""
        if self.plans:
            if self.state:
                return f"going on from {self.checkpoint}, with step {self.step + 1}"
            weights = config.run.weights
            return "starting at step 1" + ("" if weights is None else f" with the weights of {weights}")
        done = f"step {self.step} of run.steps={config.run.steps} is done, so nothing is left"
        return f"{done}; {_longer(self.checkpoint, config, 2 * self.step)}"


def _longer(checkpoint: Path | None, config: Config, steps: int) -> str:
    """Return how a run goes on to more steps, from its checkpoint to a folder of its own."""
    words = ["--resume", str(checkpoint), f"run.out={config.run.out}-{steps}", f"run.steps={steps}"]
    return f"to train longer, run it with {shlex.join(words)}"


def look(folder: RunFolder, config: Config, ranks: int, resume: str, steps: int, say: Say) -> Start:
    """Return how a run would start, and the plans of at most `steps` steps. All that can be refused is refused here.

    Raises BytescaleError. Nothing is written: a refusal leaves the run folder as it was.
    """
    if resume != "never":  # then the old run is moved out of the way
        check_owner(folder, config)
    checkpoint = choose_checkpoint(folder, resume, say)
    state = state_of(checkpoint, config, ranks)
    if state is None:
        check_start(config, say)
    index = index_documents(config, state)
    return Start(checkpoint, state, index, tuple(_plans(index, config, state, steps)))


def _plans(index: Index, config: Config, state: TrainState | None, steps: int) -> Iterator[StepPlan]:
    """Yield the plans of the next `steps` steps, if so many are left, as the ranks will make them."""
    done, cursor = (state.step, Cursor(state.epoch, state.position)) if state else (0, Cursor())
    fixed = {"cluster.nodes"} | ({"zero.stage", "optimizer.on_host"} if state else set())  # hosts; lineage.py
    with ways_out(config, fixed):
        settings = PlanSettings.of(config)
        for _ in range(min(steps, config.run.steps - done)):
            table, cursor = next_step(index, cursor, config.run.seed, config.batch_tokens, config.context)
            yield plan_step(table.length, settings)


@contextmanager
def locked(folder: RunFolder) -> Iterator[None]:
    """Create the run folder if need be, and hold its lock; the system frees it when this process ends, however.

    Of what is made here, all that is still empty in the end goes again: a refusal and a dry run leave nothing.
    """
    lock, made = folder.root / ".lock", []
    try:
        inside = (lock, folder.logs, folder.checkpoints)
        made = [path for path in (*inside, folder.root, *folder.root.parents) if not path.exists()]
        folder.logs.mkdir(parents=True, exist_ok=True)
        folder.checkpoints.mkdir(exist_ok=True)
        handle = lock.open("w")
    except OSError as error:
        _remove_empty(made)
        hint = "name another with run.out=DIR"
        message = f"cannot write the run folder: {error.strerror}"
        raise RunFolderError(message, key=str(folder.root), hint=hint) from error
    with handle:
        _take(handle, folder)
        try:
            yield
        finally:  # under the lock: nobody else is using the folder
            with suppress(OSError):
                if lock in made:
                    lock.unlink()
            _remove_empty(made)


def _take(lock: TextIO, folder: RunFolder) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = os.fstat(lock.fileno()).st_nlink > 0  # else its last holder removed it, and the next one makes another
    except OSError:
        held = False
    if not held:
        hint = "wait for it, or name another with run.out=DIR"
        raise RunFolderError("another run is using this folder", key=str(folder.root), hint=hint)


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # it is not empty, or not there
            folder.rmdir()


def check_owner(folder: RunFolder, config: Config) -> None:
    """Raise ConfigError, with the differences, if the folder belongs to another config; nothing is written."""
    if not folder.resolved.exists():
        return
    before = read_resolved(folder.resolved)
    changes = [line for line in diff(before, config) if not line.startswith("run.out:")]
    if changes:
        saved = newest_first(folder.checkpoints)
        grown = len(changes) == 1 and config.run.steps > before.run.steps
        hint = _longer(saved[0], config, config.run.steps) if grown and saved else _OTHER
        more = f" (and {len(changes) - 3} more)" if len(changes) > 3 else ""
        raise ConfigError(
            f"this run folder belongs to another config: {'; '.join(changes[:3])}{more}",
            key=f"run.out={folder.root}",
            hint=hint,
        )


def set_aside(folder: RunFolder) -> Path:
    """Move an old run out of the way, to the first free `NAME.N`; return where it is now."""
    number = 1
    while (kept := folder.root.with_name(f"{folder.root.name}.{number}")).exists():
        number += 1
    folder.root.rename(kept)
    return kept


def choose_checkpoint(folder: RunFolder, resume: str, say: Say) -> Path | None:
    """Return the verified checkpoint to go on from: the newest valid one (`auto`), or what `resume` names."""
    if resume == "never":
        return None
    if resume == "auto":
        return saved.choose(folder.checkpoints, say)
    return saved.verified(Path(resume), say).absolute()


def state_of(checkpoint: Path | None, config: Config, ranks: int) -> TrainState | None:
    """Return the state of a verified checkpoint, if there is one. Raises CheckpointError if it is of another run."""
    if checkpoint is None:
        return None
    state = checkpoints.read_state(checkpoint)
    check_lineage(checkpoint, state, config, ranks)
    return state


def index_documents(config: Config, state: TrainState | None) -> Index:
    """Read all documents once and return their index. Raises DataError, also if they changed since."""
    index = build_index(config.data)
    if state is not None:
        check_fingerprint(index, state.fingerprint)
    return index


def check_start(config: Config, say: Say) -> None:
    """Check the weights that a run from step 0 starts with. Raises DataError with all that does not fit the model."""
    if config.run.weights is None:
        return
    from engine.weights.check import check_weights  # it builds the model, without storage, and so imports torch

    for line in check_weights(Path(config.run.weights), config):
        say(line)


def go_back(folder: RunFolder, step: int, say: Say) -> None:
    """Leave nothing of what came after `step`, nor of what was cut short."""
    checkpoints.clear_ruins(folder.checkpoints)
    checkpoints.abandon(folder.checkpoints, step, say)
    metrics.cut_back(folder.metrics, step, say)


def write_facts(folder: RunFolder, config: Config, index: Index, parameters: int) -> None:
    """Write the config, the index and the facts of the corpus into the run folder, for the ranks and the report."""
    index.save(folder.index)
    write_durably(folder.resolved, resolved_yaml(config).encode())
    facts = {
        "bigram_nats": index.bigram_nats,
        "documents": len(index.lengths),
        "empty_documents": index.empty,
        "validation_documents": int(index.validation.sum()),
        "parameters": parameters,
    }
    write_json(folder.summary, facts)
