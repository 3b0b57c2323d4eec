"""Before any rank starts: the run folder is ours and is this config's, and the documents are there and are the same."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.config.load import diff, read_resolved, resolved_yaml
from engine.config.schema import Config
from engine.data.index import Index, build_index, check_fingerprint
from engine.errors import ConfigError, RunFolderError
from engine.files import write_durably
from engine.trainer import checkpoint as checkpoints
from engine.trainer import metrics
from engine.trainer.checkpoint import TrainState
from engine.trainer.folder import RunFolder, write_json
from engine.trainer.lineage import check_lineage

Say = Callable[[str], None]


@contextmanager
def locked(folder: RunFolder) -> Iterator[None]:
    """Create the run folder if need be, and hold its lock; the system frees it when this process ends, however."""
    try:
        folder.logs.mkdir(parents=True, exist_ok=True)
        folder.checkpoints.mkdir(exist_ok=True)
        handle = (folder.root / ".lock").open("w")
    except OSError as error:
        hint = "name another with run.out=DIR"
        raise RunFolderError(
            f"cannot write the run folder: {error.strerror}", key=str(folder.root), hint=hint
        ) from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            hint = "wait for it, or name another with run.out=DIR"
            raise RunFolderError("another run is using this folder", key=str(folder.root), hint=hint) from error
        yield


def check_owner(folder: RunFolder, config: Config) -> None:
    """Raise ConfigError, with the differences, if the folder belongs to another config; nothing is written."""
    if not folder.resolved.exists():
        return
    changes = [line for line in diff(read_resolved(folder.resolved), config) if not line.startswith("run.out:")]
    if changes:
        more = f" (and {len(changes) - 3} more)" if len(changes) > 3 else ""
        raise ConfigError(
            f"this run folder belongs to another config: {'; '.join(changes[:3])}{more}",
            key=f"run.out={folder.root}",
            hint="name another run.out, or take the change back",
        )


def set_aside(folder: RunFolder) -> Path:
    """Move an old run out of the way, to the first free `NAME.N`; return where it is now."""
    number = 1
    while (kept := folder.root.with_name(f"{folder.root.name}.{number}")).exists():
        number += 1
    folder.root.rename(kept)
    return kept


def choose_checkpoint(folder: RunFolder, resume: str, say: Say) -> Path | None:
    """Return the verified checkpoint to go on from: the newest valid one (`auto`), or the one that `resume` names."""
    if resume == "never":
        return None
    if resume == "auto":
        return checkpoints.choose(folder.checkpoints, say)
    found = checkpoints.find(Path(resume))
    checkpoints.read(found)
    return found.absolute()


def state_of(checkpoint: Path | None, config: Config, ranks: int) -> TrainState | None:
    """Return the state of a verified checkpoint, if there is one. Raises CheckpointError if it is of another run."""
    if checkpoint is None:
        return None
    state = checkpoints.read_state(checkpoint)
    check_lineage(checkpoint, state, config, ranks)
    return state


def index_documents(folder: RunFolder, config: Config, state: TrainState | None) -> Index:
    """Read all documents once and write the index for the ranks. Raises DataError, also if they changed since."""
    index = build_index(config.data)
    if state is not None:
        check_fingerprint(index, state.fingerprint)
    index.save(folder.index)
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
    metrics.cut_back(folder.metrics, step)


def write_facts(folder: RunFolder, config: Config, index: Index, parameters: int) -> None:
    """Write the config and the facts of the corpus into the run folder."""
    write_durably(folder.resolved, resolved_yaml(config).encode())
    facts = {
        "bigram_nats": index.bigram_nats,
        "documents": len(index.lengths),
        "empty_documents": index.empty,
        "validation_documents": int(index.validation.sum()),
        "parameters": parameters,
    }
    write_json(folder.summary, facts)
