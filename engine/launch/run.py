"""Trains the model of a recipe: checks the config, prepares the run folder, runs the ranks, summarises the result."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.cluster.cluster import Cluster
from engine.config.schema import Config
from engine.config.sources import source_configs
from engine.config.toys import toys
from engine.config.units import counted, format_bytes
from engine.cost.model import Costs
from engine.data.overview import Corpora
from engine.data.quarantine import MOST
from engine.errors import BytescaleError, ConfigError, ExitCode, MemoryFitError, PreflightError
from engine.files import remove_ruins
from engine.fit.check import check_fit
from engine.fit.host import host_problem, tight, waits_for_checkpoints
from engine.fit.machine import on_this_machine
from engine.launch import prepare
from engine.launch.checks import check_launch, gpu_problem, idle_gpus, not_launchable
from engine.launch.commands import node_commands
from engine.launch.copies import copies
from engine.launch.dry_run import PLANNED, dry_run_of
from engine.launch.environment import environment_problem, forwarded
from engine.launch.host_adam import check_host_adam
from engine.launch.join import Joins
from engine.launch.launchers import Launcher, Starts
from engine.launch.place import check_place
from engine.launch.ranks import PreemptedError, RankError, run_ranks, unfailing
from engine.launch.restarts import Restarts
from engine.run import metrics
from engine.run.checkpoints import newest_first
from engine.run.folder import RunFolder
from engine.run.remote import Remote

_EXHAUSTED = {"repeat": "repeat them", "drop": "drop the source", "stop": "stop the run"}
Say = Callable[[str], None]
OnStep = Callable[[Mapping[str, Any]], None]


def train(
    config: Config,
    resume: str = "auto",
    launcher: str | None = None,
    dry_run: bool = False,
    say: Say = print,
    on_step: OnStep = lambda line: None,
    joins: Joins | None = None,
) -> dict[str, Any]:
    """Train the model of a recipe, or show what training would do; return what the command prints as JSON.

    `resume` is `auto`, `never`, or the path or URL of a checkpoint or of a run's checkpoints. `launcher` is `local`,
    `hostfile`, or None if the user chose none; with `joins`, somebody else has started the processes of the other
    nodes. `say` gets messages, and `on_step` the metrics of each step. Raises BytescaleError: for a mistake, before
    anything is written, or with the cause of the first rank that failed.
    """
    say = unfailing(say)
    cluster = joins.cluster(config.cluster) if joins else Cluster.of(config.cluster)
    folder = RunFolder(Path(config.run.out))
    check_launch(config, cluster, launcher)
    refused = not_launchable(config, cluster, joins is not None)
    if refused and not dry_run:
        raise ConfigError.of(refused)
    check_fit(config, {"cluster.nodes"})  # the nodes are those of this start, so more are not suggested
    of_gpus = gpu_problem(config, cluster)
    unready = [problem for problem in (of_gpus, environment_problem(config, os.environ)) if problem]
    if unready and not dry_run:
        raise PreflightError.of(unready)
    if of_gpus is None:  # else this is not the machine on which the run will be
        config, lowered = on_this_machine(config, cluster)
        cluster = joins.cluster(config.cluster) if joins else Cluster.of(config.cluster)
        for line in (*lowered, idle_gpus(config, cluster)):
            if line:
                say(line)
    check_place(folder, config)
    remote = Remote(config.run.remote) if config.run.remote else None
    with prepare.locked(folder):
        if not dry_run:
            remove_ruins(folder.checkpoints, folder.root)  # first: it may free the space of a full disk
            if joins:
                joins.publish()
                if joins.joined.restarted and resume != "auto" and newest_first(folder.checkpoints):
                    say(f"this is a restart of the job: it goes on with {folder.root}, not with --resume {resume}")
                    resume = "auto"
        resume = prepare.fetched(folder, config, remote, resume, dry_run, say)
        steps = PLANNED if dry_run else 1
        start = prepare.plan_start(folder, config, cluster.ranks, resume, steps, say, hashes=dry_run)
        host_too_small = host_problem(start.plans[:1], config, cluster)
        if dry_run:
            refused += [problem for problem in (*unready, host_too_small) if problem]
            joined_at = joins.address if joins else None
            return {"dry_run": dry_run_of(config, cluster, folder, start, refused, joined_at)}
        if host_too_small:
            raise MemoryFitError.of([host_too_small])
        check_host_adam(config, say)
        if resume != "never" or not folder.resolved.exists():
            with copies(folder.checkpoints, remote, start.step, say):
                return _train(config, cluster, folder, start, resume, say, on_step, joins)
        if joins:
            joins.withdraw()  # the folder is renamed
        say(f"the old run is now in {prepare.set_aside(folder)}")
    # A new folder: the old one was renamed with its lock.
    with prepare.locked(folder), copies(folder.checkpoints, remote, 0, say):
        if joins:
            joins.publish()
        return _train(config, cluster, folder, start, "auto", say, on_step, joins)


def _train(
    config: Config,
    cluster: Cluster,
    folder: RunFolder,
    start: prepare.Start,
    resume: str,
    say: Say,
    on_step: OnStep,
    joins: Joins | None,
) -> dict[str, Any]:
    """Run the remaining steps in a locked run folder, write the report, and return what the command prints as JSON.

    Note: [damage found by ranks]. Ranks compare the hashes of the checkpoint, each a part: one process would take
    minutes. Where they find damage, they end before they have changed anything, and the launcher compares the hashes
    itself: it alone can choose another checkpoint, because metrics and ledger go back with it. Damage is rare, so this
    may be slow. Ranks check what was chosen again; if they still find damage, the run ends.
    """
    parameters = Costs.of(config).parameters
    prepare.write_facts(folder, config, start.corpora, parameters)
    of_host = tight(config, cluster), waits_for_checkpoints(config, cluster)
    for line in (*_facts(config, cluster, start.corpora, parameters), *of_host):
        if line:
            say(line)
    if not joins and (withheld := forwarded(os.environ, cluster).withheld):
        say(f"not forwarded to other hosts, because they look like secrets: {', '.join(withheld)}")
    restarts, compared = Restarts(config.run.restarts, folder), False
    launcher: Launcher = joins or Starts()
    while True:
        prepare.go_back(folder, start.step, say)
        say(f"{folder.root}: {start.outlook(config)}")
        if not start.plans:
            break
        try:
            commands = node_commands(
                cluster, folder, start.checkpoint, config, joined_at=joins.address if joins else None
            )
            run_ranks(commands, folder, MetricsTail(folder, config, on_step, say), say, launcher)
            break
        except PreemptedError:
            _report(folder, say)
            raise
        except RankError as error:
            _report(folder, say)
            if not launcher.restarts:
                raise
            damaged = error.code == ExitCode.NO_CHECKPOINT and start.checkpoint is not None and not compared
            if not damaged:
                say(restarts.after(error, start.step))
            failure = error
        again = resume if damaged or not newest_first(folder.checkpoints) else "auto"
        used, compared = start.checkpoint, damaged
        start = prepare.plan_start(folder, config, cluster.ranks, again, 1, say, hashes=damaged)
        if damaged and start.checkpoint == used:
            say(f"warning: {failure}; the launcher finds no damage and tries once more")

    lines = metrics.read_metrics(folder.metrics)
    # A crash may have lost the line of the last step. Then do not report an older step's loss as the result.
    last = lines[-1] if lines and lines[-1]["step"] >= start.step else {"step": start.step, "loss": None}
    validated = [line["validation_loss"] for line in lines if "validation_loss" in line]
    known = start.corpora.overview
    report, bigram_nats = _report(folder, say), known and known.bigram_nats
    if validated and bigram_nats is not None:
        verdict = "below" if validated[-1] < bigram_nats else "not below"
        bigram = f"the bigram entropy of the corpus, {bigram_nats:.3f}"
        say(f"validation loss {validated[-1]:.3f} nats per token, {verdict} {bigram}")
    if left_out := (lines[-1].get("left_out") if lines else None):
        say(left_out_so_far(left_out, folder))
    if start.plans and (ended := last.get("ended")):  # else the outlook has said it
        say(f"{folder.root}: the run ended after step {last['step']} of run.steps={config.run.steps}: {ended}")
    if report:
        say(f"report: {report}")
    return {
        "train": {
            "steps": last["step"],
            "loss": last["loss"],
            "validation_loss": validated[-1] if validated else None,
            "bigram_nats": bigram_nats,
            "report": report,
            "out": str(folder.root),
        }
    }


def _facts(config: Config, cluster: Cluster, corpora: Corpora, parameters: int) -> Iterator[str | None]:
    """Yield lines that describe the model, the ranks and the documents, and settings that may be mistakes."""
    ranks = counted(cluster.ranks, "rank")
    yield f"recipe {config.recipe}: {parameters:,} parameters, {ranks}, {counted(config.run.steps, 'step')}"
    yield toys(config, "model", "documents")
    known = corpora.overview
    pattern = f" matching {config.data.pattern}" if config.data.format == "folder" else ""
    empty = f" (skipped {counted(known.empty, 'empty one')})" if known and known.empty else ""
    size = "not counted; blocks are read when they are needed"
    number = f"{known.training + known.validation:,}{empty}" if known else size
    yield f"documents of {config.data.place}{pattern}: {number}"
    yield _exhausted(config, [corpus.name for corpus in corpora.sources if corpus.share < 1])
    warm_up, steps = config.optimizer.warmup_steps, config.run.steps
    if steps < warm_up:
        yield f"optimizer.warmup_steps={warm_up} is more than run.steps={steps}: optimizer.lr is never reached"


def _exhausted(config: Config, trained: Sequence[str]) -> str:
    """Describe what is done when all documents of a source were used, for the sources that are trained on."""
    of_policy = dict[str, list[str]]()
    for name, source in source_configs(config.data).items():
        if name in trained:
            of_policy.setdefault(source.exhausted, []).append(name)
    one = len(of_policy) == 1
    done = (_EXHAUSTED[policy] + ("" if one else f" ({', '.join(names)})") for policy, names in of_policy.items())
    return f"when all documents of a source were used (data.exhausted): {', '.join(done)}"


def _report(folder: RunFolder, say: Say) -> str | None:
    """Write the report and return its path; None without metrics, or if it fails, which does not fail the run."""
    try:
        # Imported here, after the ranks: matplotlib is slow to import, and a failure must not fail the run.
        from engine.report.run_page import write_report

        return str(write_report(folder.root)) if metrics.read_metrics(folder.metrics) else None
    except (Exception, KeyboardInterrupt) as error:  # whatever it is, the user must see how the run itself ended
        what = error.problems[0].key if isinstance(error, BytescaleError) else type(error).__name__
        say(" ".join(f"the report could not be written: {what}: {error}".split()))
        return None


class MetricsTail:
    """Calls `on_step` for each line that the ranks add to the metrics.

    Warns once if a host had less memory than a rank needs for offload or for a copy of its states, if a step has more
    than `batch_tokens`, and if validation sets are empty; and when documents were left out: at the first one, and
    whenever their number has doubled.
    """

    def __init__(self, folder: RunFolder, config: Config, on_step: OnStep, say: Say) -> None:
        self._folder, self._config, self._on_step, self._say = folder, config, on_step, say
        self._offset = folder.metrics.stat().st_size
        self._warned, self._left_out = set[str](), 0  # kinds of warnings that are given once

    def __call__(self) -> None:
        """Read the lines added since the last call."""
        lines, self._offset = metrics.read_from(self._folder.metrics, self._offset)
        for line in lines:
            for kind, warning in self._warnings(line):
                if kind not in self._warned:
                    self._warned.add(kind)
                    self._say(f"warning: {warning}")
            if (left_out := line.get("left_out", 0)) >= max(1, 2 * self._left_out):
                self._left_out = left_out
                self._say(f"warning: {left_out_so_far(left_out, self._folder)}")
            self._on_step(line)

    def _warnings(self, line: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield the kind and the text of each warning that a step gives rise to."""
        if short := line.get("host_short"):  # bytes
            yield (
                "host",
                f"a host lacked {format_bytes(short)} that a rank needs for offload; activations that did not fit stay "
                f"on the device; set a smaller cluster.host_memory to plan with less (details: {self._folder.logs})",
            )
        if short := line.get("copy_short"):  # bytes
            what = f"a host lacked {format_bytes(short)} for a copy of a rank's states"
            yield "copy", f"{what}; training waits while checkpoints are written (`save_s` in {self._folder.metrics})"
        most, data = self._config.batch_tokens, self._config.data
        if (tokens := line.get("tokens", 0)) > most:
            piece, way = "document", "data.long=split distributes its pieces over steps"
            if data.long == "split":
                piece, way = f"piece of context={self._config.context} tokens", "set a smaller context"
            what = f"step {line['step']} has {tokens:,} tokens, more than batch_tokens={most}"
            yield "long", f"{what}: a longer {piece} forms a step of its own; {way}"
        if empty := line.get("unvalidated"):
            sets = f"validation sets of {', '.join(empty)} are" if data.sources else "validation set is"
            yield "validation", f"the {sets} empty; set a larger data.validation_share or data.validation_tokens"


def left_out_so_far(count: int, folder: RunFolder) -> str:
    """Describe how many documents were left out so far."""
    number = f"{'at least ' if count >= MOST else ''}{counted(count, 'document')}"
    return f"{number} could not be used and {'was' if count == 1 else 'were'} left out; see {folder.quarantine}"
