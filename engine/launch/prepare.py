"""Prepares a run before any rank starts: locks its folder, chooses a checkpoint, indexes documents, plans steps."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine import files
from engine.cluster.cluster import nodes_of
from engine.config.load import diff, read_resolved, resolved_yaml
from engine.config.schema import Config
from engine.config.units import counted
from engine.data.block_files import write_blocks
from engine.data.blocks.blocks import is_of
from engine.data.corpus import TokenCorpus
from engine.data.host_files import write_files
from engine.data.ledger import Ledger
from engine.data.overview import Corpora, check_ids, tokenizer_facts
from engine.data.parts import Tokens
from engine.data.steps import Cursor
from engine.errors import CheckpointError, ConfigError, DataError, PreflightError, RunFolderError
from engine.files import LOCK, write_durably, write_json
from engine.folders import remove_folder, remove_ruins
from engine.launch.launch import Launch
from engine.launch.say import Say
from engine.planner.make import plan_step
from engine.planner.plan.step_plan import StepPlan
from engine.readers import read_object
from engine.run import checkpoints, metrics, saved
from engine.run.checkpoints import TrainState, newest_first
from engine.run.compatibility import check_compatible, check_fingerprints, same_run
from engine.run.folder import RunFolder
from engine.run.remote import Remote, fetch, is_url, reaching
from engine.trainer.schedule import learning_rate
from engine.weights.generation import read_generation
from engine.weights.tokenizer import check_tokenizer


@dataclass(frozen=True)
class Start:
    """How a run starts: its checkpoint, its documents, and the plans of its next steps."""

    checkpoint: Path | None  # None starts from scratch
    state: TrainState | None  # of the checkpoint
    corpora: Corpora
    plans: tuple[StepPlan, ...]  # empty if all steps are done, or there are no more documents

    @property
    def step(self) -> int:
        """The last finished step, 0 for a new run."""
        return self.state.step if self.state else 0

    def outlook(self, config: Config) -> str:
        """Describe where the run begins; if all steps are done, how to train longer."""
        if not self.plans:
            if self.state and self.step < config.run.steps:
                ended = self.corpora.steps.ended(Cursor.of_json(self.state.cursor))
                return f"nothing left to train after step {self.step}: {ended}"
            done = f"nothing left to train: step {self.step} of run.steps={config.run.steps} is done"
            return f"{done}; to train longer, set run.steps={2 * self.step}"
        if self.state:
            return f"resuming from {self.checkpoint} at step {self.step + 1}"
        weights = "" if config.run.weights is None else f" with the weights of {config.run.weights}"
        return f"starting at step 1{weights}"


def plan_start(launch: Launch, resume: str, steps: int, hashes: bool) -> Start:
    """Decide how a run starts, and plan its next `steps` steps, or fewer if the run ends earlier.

    `resume` is `auto`, `never` or the path of a checkpoint or run. Without `hashes` only the sizes of a checkpoint's
    files are checked; the ranks compare the hashes (Note: [damage found by ranks] in supervise.py). Raises
    BytescaleError if the checkpoint, weights or documents do not match the config. Writes only to `data.cache`: an
    error leaves the run folder as it was.
    """
    config, folder, say, ranks = launch.job.config, launch.folder, launch.say, launch.job.cluster.ranks
    if resume == "never":
        checkpoint = None
    else:
        check_owner(folder, config)  # not for `never`, which renames an old run, whatever its config
        if resume == "auto":
            checkpoint = saved.choose(folder.checkpoints, say, hashes)
        else:
            saved.check_exists(resume)
            checkpoint = saved.verified(Path(resume), say, hashes).absolute()
    # Either the checkpoint must match the config, or the weights from which a new run begins.
    state, done = None, 0
    if checkpoint is not None:
        state = checkpoints.read_state(checkpoint)
        check_compatible(checkpoint, state, config, tokenizer_facts(config.data))
        done = state.step
        if state.ranks != ranks:
            say(f"{counted(state.ranks, 'rank')} wrote the checkpoint; its states are divided among {ranks} now")
        if line := _new_schedule(checkpoint, done, config):
            say(line)
    elif config.run.weights is not None:
        from engine.weights.check import check_weights  # imports torch: it builds the model, without storage

        for line in check_weights(Path(config.run.weights), config):
            say(line)
        check_tokenizer(Path(config.run.weights), config.data)
    corpora, cursor = Corpora(config), Cursor()
    check_ids(corpora.sources, config.model.vocab)
    if state is not None:
        if not state.cursor:
            hint = "export its weights with `bytescale ckpt export`, or start a new run with another run.out"
            raise CheckpointError("was written with an older order of documents", key=str(checkpoint), hint=hint)
        check_fingerprints(corpora.fingerprints, state.fingerprints, corpora.read_lately)
        cursor = Cursor.of_json(state.cursor)
        _check_validation(corpora, cursor)
        if line := _changed_sources(corpora, state):
            say(line)
    # Only the blocks of the first steps are packed, so only their documents can be compared with those of the
    # checkpoint.
    corpora.pack_first(cursor, say)
    if checkpoint is not None and (line := _changed_documents(RunFolder(checkpoint.parent.parent), corpora, cursor)):
        say(line)
    # Planned before any rank starts, so a step that cannot be planned is an error of the command.
    plans = list[StepPlan]()
    while len(plans) < min(steps, config.run.steps - done) and (found := corpora.next(cursor)) is not None:
        table, cursor = found
        plans.append(plan_step(table.length, launch.job.settings))
    return Start(checkpoint, state, corpora, tuple(plans))


def fetched(launch: Launch, remote: Remote | None, resume: str, dry_run: bool) -> str:
    """Copy the checkpoint into the run folder, if the run resumes from a URL; return what `resume` then is.

    That is so for `resume` = URL, and for `auto` if `remote` has a newer checkpoint than the run folder. A dry run
    copies nothing. Raises CheckpointError if the checkpoint does not match the config, before it is copied;
    PreflightError if the URL cannot be read, unless the run folder has a checkpoint; ConfigError for another run if
    `remote` has checkpoints, because it would mix its own with them.
    """
    config, folder, say = launch.job.config, launch.folder, launch.say
    asked, own = Remote(resume, "--resume") if is_url(resume) else None, newest_first(folder.checkpoints)
    continues = resume == "auto" or own or (asked and remote and asked.url == remote.url)
    # A new run must not mix its checkpoints with those of another run.
    if remote is not None and (resume == "never" or not continues):
        with reaching(remote):
            names = remote.newest_first()
        if names:
            hint = "choose another folder for a new run, or remove them"
            raise ConfigError(f"{remote.url} has checkpoints, such as {names[0]}", key="run.remote", hint=hint)
    source = asked or (remote if resume == "auto" else None)
    if source is None:
        return resume
    try:
        with reaching(source):
            names = source.newest_first()
    except PreflightError as error:
        if asked or not own:
            raise
        say(f"warning: {source.url} {error}; resuming from {own[0]}")
        return resume
    # The run folder is as new as the remote one.
    if asked is None and (not names or (own and names[0] <= own[0].name)):
        return resume
    check_owner(folder, config)
    if dry_run:
        say(f"this dry run copies nothing; a run would resume from {source.url}/{source.some()[0]}")
        return "auto"
    tokenizer = tokenizer_facts(config.data)

    def check(state: TrainState) -> None:
        check_compatible(source.url, state, config, tokenizer)

    with reaching(source):
        return str(fetch(source, folder.checkpoints, check, say))


def _check_validation(corpora: Corpora, cursor: Cursor) -> None:
    """Raise ConfigError if a source that was trained on would be for validation alone."""
    trained = {name for name, (tokens, _) in (cursor.mixer or {"sources": {}})["sources"].items() if tokens}
    for corpus in corpora.sources:
        if corpus.share == 1 and corpus.name in trained:
            message = (
                f"has no weight for {corpus.name}, which was trained on: all its documents would be for validation"
            )
            hint = f"keep its earlier segment in data.mix, or remove data.sources.{corpus.name}"
            raise ConfigError(message, key="data.mix", hint=hint)


def _changed_sources(corpora: Corpora, state: TrainState) -> str | None:
    """Describe where sources begin that the run did not have in its last step, and which are left out, else None."""
    mixer = state.cursor["mixer"]
    last = mixer["sources"] if mixer else state.fingerprints
    found = list[str]()
    for corpus in corpora.sources:
        if corpus.name not in state.fingerprints:
            where = "for validation alone" if corpus.share == 1 else "begins at its first document"
            found.append(f"{corpus.name} is new and {where}")
        elif corpus.name not in last:
            found.append(f"{corpus.name} is back and continues where it stopped")
    found += (f"{name} is left out" for name in last if name not in corpora.fingerprints)
    return f"data.sources: {'; '.join(found)}" if found else None


def _changed_documents(folder: RunFolder, corpora: Corpora, cursor: Cursor) -> str | None:
    """Describe how many documents of the step before `cursor` have other contents now than in the ledger, else None.

    Fingerprints do not show it if names and sizes are the same. Only token files and blocks that the next step needs
    are compared: these have been packed, so nothing is read for this alone.
    """
    ledger = Ledger(folder.ledger)
    if damaged := ledger.damaged(cursor.step):
        message = f"warning: the ledger is damaged: {'; '.join(damaged)}"
        return f"{message}; the run continues, but these steps cannot be traced or compared"
    names, rows = ledger.sources, ledger.documents(cursor.step)
    of_name, packed = {corpus.name: corpus for corpus in corpora.sources}, corpora.first(cursor)
    compared, changed = 0, list[str]()
    for source, block, document, content in rows[["source", "block", "document", "hash"]].tolist():
        name = names[source]
        corpus = of_name.get(name)
        if corpus is None or not (isinstance(corpus, TokenCorpus) or (name, block) in packed):
            continue
        compared, found = compared + 1, corpus.lengths(block)
        if not is_of(found, document, content):
            changed.append(f"{name}:{block}:{document}")
    if not changed:
        return None
    message = f"warning: {len(changed):,} of {counted(compared, 'document')} of step {cursor.step} have changed since"
    return f"{message}, for example {changed[0]}; the run continues with their present contents"


def _new_schedule(checkpoint: Path, step: int, config: Config) -> str | None:
    """Describe how the learning rate changes after `step` if the run is longer or shorter than before.

    The rate is a function of `run.steps`, so it jumps. The schedule before is that of the run of the checkpoint. None
    if nothing changes in the digits that are shown.
    """
    try:
        before = read_resolved(RunFolder(checkpoint.parent.parent).resolved)
    except (ConfigError, PermissionError):
        return None  # the checkpoint is not in a run, or in one of another version
    steps = config.run.steps
    if before.run.steps == steps or step >= steps:
        return None
    was = learning_rate(step, before.run.steps, before.optimizer)
    then = (learning_rate(at, steps, config.optimizer) for at in (step + 1, steps))
    rate, now, last = (f"{each:.3g}" for each in (was, *then))
    if rate == now == last:
        return None
    jump = f"goes from {rate} in step {step} to {now} in step {step + 1}"
    if rate == now:
        jump = f"is {rate} in steps {step} and {step + 1}"
    end = f", and is {last} in step {steps}" if steps > step + 1 else ""
    return f"run.steps: {before.run.steps} -> {steps}: the learning rate {jump}{end}"


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


def check_owner(folder: RunFolder, config: Config) -> None:
    """Raise ConfigError, with the differences, if the folder contains a run that this config would not continue.

    A run that never finished a step nor saved a checkpoint does not count: its launch failed, perhaps by its config.
    """
    if not folder.resolved.exists():
        return
    saved = newest_first(folder.checkpoints)
    if not saved and not metrics.read_metrics(folder.metrics):
        return
    try:
        before = read_resolved(folder.resolved)
    except ConfigError as error:  # damaged, or of another version, whose checkpoints may be resumed all the same
        error.problems = tuple(replace(one, hint=f"{one.hint}{_elsewhere(saved, config)}") for one in error.problems)
        raise
    changes = diff(before, config)
    changes = [line for line in changes if not same_run(line.partition(":")[0], bool(saved))]
    if changes:
        hint = f"undo the change, or choose another run.out{_elsewhere(saved, config)}"
        more = f" (and {len(changes) - 3} more)" if len(changes) > 3 else ""
        message = f"this folder contains a run with another config: {'; '.join(changes[:3])}{more}"
        raise ConfigError(message, key=f"run.out={folder.root}", hint=hint)


def _elsewhere(saved: Sequence[Path], config: Config) -> str:
    """Say how to resume from the newest of these checkpoints in another run folder; nothing if none can be resumed."""
    usable = next((one for one in saved if _can_resume(one, config)), None)
    return f"; to resume this run in another folder, add --resume {shlex.quote(str(usable))}" if usable else ""


def _can_resume(checkpoint: Path, config: Config) -> bool:
    """Return whether a run with this config may resume from a checkpoint. Neither hashes nor documents are checked."""
    try:
        check_compatible(checkpoint, checkpoints.read_state(checkpoint), config)
    except CheckpointError:
        return False
    return True


def set_aside(folder: RunFolder) -> Path:
    """Rename the folder of an old run to the first free `NAME.N`, and return the new path."""
    kept = files.free_name(folder.root)
    folder.root.rename(kept)
    return kept


def go_back(folder: RunFolder, step: int, say: Say) -> None:
    """Reset a run folder to `step`: remove ruins, rename later checkpoints, cut later metrics.

    Ranks begin to write a checkpoint without looking for the ruin of an earlier write (checkpoints.py).
    Without a step, nothing depends on the documents that were read before, and the user may have repaired some. So the
    ledger and the list of documents that were left out begin again. The metrics are renamed: a user may have removed
    the checkpoints of a long run.
    """
    if step == 0:
        if done := max((line["step"] for line in metrics.read_metrics(folder.metrics)), default=0):
            folder.metrics.rename(kept := files.free_name(folder.metrics))
            what = f"the metrics of {counted(done, 'step')} are now in {kept}"
            say(f"warning: {folder.checkpoints} has no checkpoint: the run starts again at step 1, and {what}")
            metrics.read_metrics(kept, say)
        if folder.ledger.exists():
            remove_folder(folder.ledger)
        folder.quarantine.unlink(missing_ok=True)
    remove_ruins(folder.checkpoints)
    checkpoints.abandon(folder.checkpoints, step, say)
    metrics.cut_back(folder.metrics, step, say)


def write_facts(folder: RunFolder, config: Config, corpora: Corpora, parameters: int) -> None:
    """Write the config, summary.json and the list of blocks to the run folder. `parameters` counts model weights."""
    write_durably(folder.resolved, resolved_yaml(config).encode())
    tokenizer = tokenizer_facts(config.data)
    placed = None
    if len(nodes_of(config.cluster)) > 1:
        placed = corpora.placed()
        write_files(folder.files, corpora.blocks)
    write_blocks(folder.blocks, corpora.blocks, tokenizer["fingerprint"] if tokenizer else None, placed)
    known, (bos, eos) = corpora.overview, corpora.sources[0].ends  # all sources have the same tokenizer
    facts = {
        "fingerprints": corpora.fingerprints,
        "tokenizers": sorted({corpus.kind or "unknown" for corpus in corpora.sources}),
        "bos": bos,
        "eos": eos,
        "end_of_turn": _end_of_turn(config),
        "generation": _generation(folder, config, eos),
        "bigram_nats": known and known.bigram_nats,
        "documents": known and known.training + known.validation,
        "empty_documents": known and known.empty,
        "dropped_documents": known and known.dropped,
        "validation_documents": known and known.validation,
        "parameters": parameters,
    }
    write_json(folder.summary, facts)


def _end_of_turn(config: Config) -> int | None:
    """Return the token with which the chat template of `data.tokenizer` ends a turn; None if there is none."""
    try:
        return Tokens.of(config.data).open().end_of_turn
    except DataError:  # token files do not need their tokenizer
        return None


def _generation(folder: RunFolder, config: Config, eos: int | None) -> dict[str, Any]:
    """Return the generation_config.json of `run.weights`; that of summary.json for a run that was started before.

    `eos` is that of the documents.
    """
    weights = config.run.weights
    if weights is not None and Path(weights).is_dir():
        return read_generation(Path(weights), eos)
    found = read_object(folder.summary).get("generation") if weights is not None and folder.summary.exists() else None
    return found if isinstance(found, dict) else {}
