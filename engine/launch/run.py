"""From a config to processes, and from their ends to one answer. No torch here: the ranks import it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from engine.cluster.cluster import Cluster
from engine.config.schema import Config
from engine.config.units import counted, format_bytes
from engine.cost.model import Costs
from engine.data.index import Index
from engine.data.tokenizer import VOCAB
from engine.errors import BytescaleError, ConfigError, MemoryFitError, Problem
from engine.launch import prepare
from engine.launch.commands import free_port, is_local, is_loopback, rank_commands
from engine.launch.dry_run import PLANNED, dry_run_of
from engine.launch.host_adam import check_host_adam
from engine.launch.host_memory import host_problem, tight
from engine.launch.place import check_place
from engine.launch.ranks import PreemptedError, RankError, run_ranks, unfailing
from engine.launch.unbuilt import unbuilt
from engine.report.run import write_report
from engine.trainer import metrics
from engine.trainer.folder import RunFolder

__all__ = ["RankError", "train"]

Say = Callable[[str], None]
OnStep = Callable[[Mapping[str, Any]], None]


def train(
    config: Config,
    resume: str = "auto",
    launcher: str | None = None,
    dry_run: bool = False,
    say: Say = print,
    on_step: OnStep = lambda line: None,
) -> dict[str, Any]:
    """Train a recipe, or show what would be done; return what the command prints as JSON.

    `resume` is `auto`, `never` or a checkpoint's path; `launcher` None chooses. `on_step` gets each step's metrics.
    Raises BytescaleError: of a mistake before anything is written, or of the first failing rank.
    """
    say = unfailing(say)
    cluster = Cluster.of(config.cluster)
    folder = RunFolder(Path(config.run.out))
    check = check_launch if dry_run else check_trainable
    check(config, cluster, launcher)
    check_place(folder, config)
    with prepare.locked(folder):
        start = prepare.look(folder, config, cluster.ranks, resume, PLANNED if dry_run else 1, say)
        short = host_problem(start.plans[:1], config, cluster)
        if dry_run:
            refused = [*lacking(config, cluster), *([short] if short else [])]
            return {"dry_run": dry_run_of(config, cluster, folder, start, refused)}
        if short:
            raise MemoryFitError.of([short])
        check_host_adam(config.optimizer, say)
        if resume != "never" or not folder.resolved.exists():
            return _train(config, cluster, folder, start, say, on_step)
        say(f"the old run is kept as {prepare.set_aside(folder)}")
    with prepare.locked(folder):
        return _train(config, cluster, folder, start, say, on_step)


def check_trainable(config: Config, cluster: Cluster, launcher: str | None) -> None:
    """Raise ConfigError for what a plan or a dry run may ask for but this machine cannot train."""
    problems = lacking(config, cluster)
    if problems:
        raise ConfigError.of(problems)
    check_launch(config, cluster, launcher)


def lacking(config: Config, cluster: Cluster) -> list[Problem]:
    """Return what stands between a right config and its training: parts that are not built, hosts that have no name."""
    problems = unbuilt(config)
    if config.cluster.hostfile is None and len(cluster.nodes) > 1:
        key = f"cluster.nodes={len(cluster.nodes)}"
        problems.append(Problem("several nodes need a hostfile", key, "name one with --hostfile FILE"))
    return problems


def check_launch(config: Config, cluster: Cluster, launcher: str | None) -> None:
    """Raise ConfigError for what can never be started so, whatever is built one day."""
    if config.dtype == "fp64":
        raise ConfigError("fp64 is for tests: DeepSpeed's masters are fp32", key="dtype=fp64", hint="use fp32 or bf16")
    if config.model.vocab < VOCAB:
        key = f"model.vocab={config.model.vocab}"
        hint = "set model.vocab={}" if config.run.weights is None else "take run.weights with a vocabulary of {}"
        raise ConfigError(f"the byte tokenizer has {VOCAB} tokens", key=key, hint=f"{hint.format(VOCAB)} or more")
    if launcher == "slurm":
        raise ConfigError("the Slurm launcher is not built yet", key="--launcher slurm", hint="use local or hostfile")
    if launcher == "hostfile" and config.cluster.hostfile is None:
        raise ConfigError("there is no hostfile", key="--launcher hostfile", hint="name one with --hostfile FILE")
    hosts = [node.host for node in cluster.nodes]
    if launcher == "local" and not all(map(is_local, hosts)):
        raise ConfigError("the hostfile names other hosts", key="--launcher local", hint="use --launcher hostfile")
    loopback = [host for host in hosts if is_loopback(host)]
    if loopback and not all(map(is_local, hosts)):
        message = f"{loopback[0]} beside other hosts: on each of them it is another machine"
        raise ConfigError(message, key="cluster.hostfile", hint="give this machine the name that the others know it by")


def _train(
    config: Config, cluster: Cluster, folder: RunFolder, start: prepare.Start, say: Say, on_step: OnStep
) -> dict[str, Any]:
    parameters = Costs.of(config).parameters
    prepare.write_facts(folder, config, start.index, parameters)
    for line in (*_facts(config, cluster, start.index, parameters), tight(config, cluster)):
        if line:
            say(line)
    prepare.go_back(folder, start.step, say)
    say(f"{folder.root}: {start.outlook(config)}")
    if start.plans:
        tail = MetricsTail(folder.metrics, _noticing(on_step, folder, say))
        try:
            run_ranks(rank_commands(cluster, folder, start.checkpoint, free_port()), folder, tail, say)
        except (RankError, PreemptedError):
            _report(folder, say)
            raise
    return _summary(folder, start.index, start.step, say)


def _facts(config: Config, cluster: Cluster, index: Index, parameters: int) -> Iterator[str]:
    """Yield what is trained on what, and what might surprise."""
    ranks = counted(cluster.ranks, "rank")
    yield f"recipe {config.recipe}: {parameters:,} parameters, {ranks}, {counted(config.run.steps, 'step')}"
    empty = f" (and {counted(index.empty, 'empty one')}, skipped)" if index.empty else ""
    what = f" that match {config.data.pattern}" if config.data.format == "folder" else ""
    yield f"documents in {config.data.path}{what}: {len(index.lengths):,}{empty}"
    warm_up, steps = config.optimizer.warmup_steps, config.run.steps
    if steps < warm_up:
        yield f"optimizer.warmup_steps={warm_up} is more than run.steps={steps}: optimizer.lr is never reached"
    long = int((index.lengths > config.batch_tokens).sum())
    if long:
        yield f"longer than batch_tokens={config.batch_tokens}, so each a step of its own: {long:,}"
    if config.data.validation_tokens and not index.validation.any():
        yield "no document is kept for validation"


def _noticing(on_step: OnStep, folder: RunFolder, say: Say) -> OnStep:
    """Return `on_step` that says, once, that a host gave less than the plans send there."""
    told = False

    def notice(line: Mapping[str, Any]) -> None:
        nonlocal told
        short = line.get("host_short")
        if short and not told:
            told = True
            gave = f"a rank's host gave {format_bytes(short)} less than is offloaded to it, which stays on the device"
            say(f"warning: {gave}; with a smaller cluster.host_memory less is planned there ({folder.logs})")
        on_step(line)

    return notice


def _report(folder: RunFolder, say: Say) -> str | None:
    """Write the report if there is a step to report, and return its path. A report that fails changes no outcome."""
    try:
        return str(write_report(folder.root)) if metrics.read_metrics(folder.metrics) else None
    except (Exception, KeyboardInterrupt) as error:  # whatever it is: the run has ended, and how it did must be told
        what = error.problems[0].key if isinstance(error, BytescaleError) else type(error).__name__
        say(" ".join(f"the report could not be written: {what}: {error}".split()))
        return None


def _summary(folder: RunFolder, index: Index, began: int, say: Say) -> dict[str, Any]:
    """Return the run's result. If no step was left to run after `began`, the line of that step may be lost."""
    lines = metrics.read_metrics(folder.metrics)
    last = lines[-1] if lines and lines[-1]["step"] >= began else {"step": began, "loss": None}
    validated = [line["validation_loss"] for line in lines if "validation_loss" in line]
    report = _report(folder, say)
    result = {
        "steps": last["step"],
        "loss": last["loss"],
        "validation_loss": validated[-1] if validated else None,
        "bigram_nats": index.bigram_nats,
        "report": report,
        "out": str(folder.root),
    }
    if validated:
        verdict = "below" if validated[-1] < index.bigram_nats else "not below"
        bigram = f"the bigram entropy of the corpus, {index.bigram_nats:.3f}"
        say(f"validation loss {validated[-1]:.3f} nats a token, {verdict} {bigram}")
    if report:
        say(f"report: {report}")
    return {"train": result}


class MetricsTail:
    """Calls `on_step` for each line that the ranks add to the metrics from now on."""

    def __init__(self, path: Path, on_step: OnStep) -> None:
        self._path, self._on_step = path, on_step
        self._offset = path.stat().st_size

    def __call__(self) -> None:
        """Look whether there is something new."""
        lines, self._offset = metrics.read_from(self._path, self._offset)
        for line in lines:
            self._on_step(line)
