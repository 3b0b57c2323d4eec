"""Prepares a run before any rank starts: locks its folder, chooses a checkpoint, indexes documents, plans steps."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from engine import files
from engine.config.load import diff, read_resolved, resolved_yaml
from engine.config.schema import Config
from engine.data.corpus import Corpus, check_fingerprint, check_vocabulary, corpus_of
from engine.data.steps import Cursor, next_step
from engine.errors import CheckpointError, ConfigError, RunFolderError
from engine.files import LOCK, write_durably, write_json
from engine.fit.check import check_fit
from engine.planner.make import plan_step
from engine.planner.plan.step_plan import StepPlan
from engine.planner.settings import PlanSettings
from engine.run import checkpoints, metrics, saved
from engine.run.checkpoints import TrainState, newest_first
from engine.run.compatibility import check_compatible
from engine.run.folder import RunFolder

Say = Callable[[str], None]


@dataclass(frozen=True)
class Start:
    """How a run starts: its checkpoint, its documents, and the plans of its next steps."""

    checkpoint: Path | None  # None starts from scratch
    state: TrainState | None  # of the checkpoint
    corpus: Corpus
    plans: tuple[StepPlan, ...]  # empty if all steps are done

    @property
    def step(self) -> int:
        """The last finished step, 0 for a new run."""
        return self.state.step if self.state else 0

    def outlook(self, config: Config) -> str:
        """Describe where the run begins; if all steps are done, how to train longer."""
        if not self.plans:
            done = f"nothing left to train: step {self.step} of run.steps={config.run.steps} is done"
            return f"{done}; {_longer(self.checkpoint, config, 2 * self.step)}"
        if self.state:
            return f"resuming from {self.checkpoint} at step {self.step + 1}"
        weights = "" if config.run.weights is None else f" with the weights of {config.run.weights}"
        return f"starting at step 1{weights}"


def _longer(checkpoint: Path | None, config: Config, steps: int) -> str:
    """Describe how to resume from `checkpoint` in a new run folder, up to step `steps`."""
    words = ["--resume", str(checkpoint), f"run.out={config.run.out}-{steps}", f"run.steps={steps}"]
    return f"to train longer, run the command with {shlex.join(words)}"


def plan_start(folder: RunFolder, config: Config, ranks: int, resume: str, steps: int, say: Say) -> Start:
    """Decide how a run on `ranks` ranks starts, and plan its next `steps` steps, or fewer if the run ends earlier.

    `resume` is `auto`, `never` or the path of a checkpoint or run. Raises BytescaleError if the checkpoint, weights or
    documents do not match the config, or memory is too small. Writes nothing: an error leaves the run folder as it was.
    """
    if resume == "never":
        checkpoint = None
    else:
        check_owner(folder, config, ranks)  # not for `never`, which renames an old run, whatever its config
        auto = resume == "auto"
        checkpoint = saved.choose(folder.checkpoints, say) if auto else saved.verified(Path(resume), say).absolute()
    state, done, cursor = None, 0, Cursor()
    if checkpoint is not None:
        state = checkpoints.read_state(checkpoint)
        check_compatible(checkpoint, state, config, ranks)
        done, cursor = state.step, Cursor(state.epoch, state.position)
    elif config.run.weights is not None:
        from engine.weights.check import check_weights  # imports torch: it builds the model, without storage

        for line in check_weights(Path(config.run.weights), config):
            say(line)
    settings = PlanSettings.of(config)
    # Keys that this start cannot change must not be suggested: nodes and, when resuming, kinds of model states.
    check_fit(config, settings, {"cluster.nodes", *(("zero.stage", "optimizer.on_host") if state else ())})
    corpus = corpus_of(config.data, say)
    check_vocabulary(corpus, config)
    if state is not None:
        check_fingerprint(corpus, state.fingerprint)
    plans = []
    for _ in range(min(steps, config.run.steps - done)):
        table, cursor = next_step(corpus, cursor, config.run.seed, config.batch_tokens, config.context)
        plans.append(plan_step(table.length, settings))
    return Start(checkpoint, state, corpus, tuple(plans))


@contextmanager
def locked(folder: RunFolder) -> Iterator[None]:
    """Create the run folder if it does not exist, and lock it.

    Folders created here that are empty at the end are removed, so a refusal or a dry run leaves nothing behind. Raises
    RunFolderError if the folder cannot be written or another run uses it.
    """
    lock, created = folder.root / LOCK, list[Path]()
    with ExitStack() as stack:
        try:
            inside = (lock, folder.logs, folder.checkpoints)
            created = [path for path in (*inside, folder.root, *folder.root.parents) if not path.exists()]
            folder.logs.mkdir(parents=True, exist_ok=True)
            folder.checkpoints.mkdir(exist_ok=True)
            stack.enter_context(files.locked(lock))
        except BlockingIOError as error:
            hint = "wait until it ends, or choose another folder with run.out=DIR"
            raise RunFolderError("another run is using this folder", key=str(folder.root), hint=hint) from error
        except OSError as error:
            _remove_empty(created)
            message, hint = f"cannot write the run folder: {error.strerror}", "choose another folder with run.out=DIR"
            raise RunFolderError(message, key=str(folder.root), hint=hint) from error
        own = lock.stat()
        try:
            yield
        finally:  # still under the lock, so no other run is using the folder, unless this one was renamed meanwhile
            if lock in created and lock.exists() and os.path.samestat(own, lock.stat()):
                lock.unlink()
            _remove_empty(created)


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # it is not empty, or was never created
            folder.rmdir()


def check_owner(folder: RunFolder, config: Config, ranks: int) -> None:
    """Raise ConfigError, with the differences, if the folder contains a run with another config.

    A run that never finished a step nor saved a checkpoint does not count: its launch failed, perhaps by its config.
    """
    if not folder.resolved.exists():
        return
    saved = newest_first(folder.checkpoints)
    if not saved and not metrics.read_metrics(folder.metrics):
        return
    before = read_resolved(folder.resolved)
    # Memory only decides where things run. It may be that of the machine, and a restart may be on another one.
    free = ("run.out:", "cluster.device_memory:", "cluster.host_memory:")
    changes = [line for line in diff(before, config) if not line.startswith(free)]
    if changes:
        only_longer = len(changes) == 1 and config.run.steps > before.run.steps
        hint = "undo the change, or choose another run.out"
        usable = next((one for one in saved if _can_resume(one, config, ranks)), None)
        if usable:
            hint += f"; to resume this run in another folder, add --resume {shlex.quote(str(usable))}"
        if only_longer and usable:
            hint = _longer(usable, config, config.run.steps)
        more = f" (and {len(changes) - 3} more)" if len(changes) > 3 else ""
        message = f"this folder contains a run with another config: {'; '.join(changes[:3])}{more}"
        raise ConfigError(message, key=f"run.out={folder.root}", hint=hint)


def _can_resume(checkpoint: Path, config: Config, ranks: int) -> bool:
    """Return whether a run with this config may resume from a checkpoint. Neither hashes nor documents are checked."""
    try:
        check_compatible(checkpoint, checkpoints.read_state(checkpoint), config, ranks)
    except CheckpointError:
        return False
    return True


def set_aside(folder: RunFolder) -> Path:
    """Rename the folder of an old run to the first free `NAME.N`, and return the new path."""
    number = 1
    while (kept := folder.root.with_name(f"{folder.root.name}.{number}")).exists():
        number += 1
    folder.root.rename(kept)
    return kept


def go_back(folder: RunFolder, step: int, say: Say) -> None:
    """Reset a run folder to `step`: rename later checkpoints, cut later metrics, remove incomplete writes."""
    files.remove_ruins(folder.checkpoints)  # first, because it may free the space of a full disk
    checkpoints.abandon(folder.checkpoints, step, say)
    metrics.cut_back(folder.metrics, step, say)


def write_facts(folder: RunFolder, config: Config, corpus: Corpus, parameters: int) -> None:
    """Write the config and summary.json to the run folder. `parameters` is the number of model weights."""
    write_durably(folder.resolved, resolved_yaml(config).encode())
    facts = {
        "tokens": str(corpus.tokens.prefix.absolute()),
        "bos": corpus.facts.bos if corpus.facts else None,
        "eos": corpus.facts.eos if corpus.facts else None,
        "bigram_nats": corpus.bigram_nats,
        "documents": corpus.counts.training + corpus.counts.validation,
        "empty_documents": corpus.empty,
        "validation_documents": corpus.counts.validation,
        "parameters": parameters,
    }
    write_json(folder.summary, facts)
