"""The page of a run: its loss and other metrics, one measured step, its hosts and versions."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np

from engine.config.load import load, recipes
from engine.config.units import counted
from engine.data.runtime.watching import packed_of
from engine.errors import ConfigError
from engine.files import write_durably
from engine.job import Job
from engine.planner.plan.step_plan import StepPlan
from engine.report import headline
from engine.report.boxes import boxes, shown_in_run
from engine.report.charts import loss_picture, throughput_picture
from engine.report.curves import STEPS, Curve, curves_picture
from engine.report.page import Figure, Page, Table
from engine.report.run import RunData, read_run
from engine.report.timeline import some_ranks, timeline_picture
from engine.report.words import MODES, Pair, hdp_ranks, long_seconds, metric_text, value_texts
from engine.run.folder import RunFolder
from engine.run.status import differences

_HOSTS = 8  # names that are shown
_SOURCES = 8  # whose loaders are shown


def run_page(run: RunData) -> Page:
    """Build the page of a run, which may have stopped early."""
    # A run may have stopped before its first step, and then still needs a page that says so.
    if run.lines:
        steps, loss, validation = (run.column(name) for name in ("step", "loss", "validation_loss"))
        caption = "Mean loss per token at each step."
        if not math.isnan(run.bigram_nats):
            caption += (
                " The dashed line is the bigram entropy of the corpus: the lowest loss of a model that sees only the "
                "previous token."
            )
        losses = Figure.of("Loss", caption, lambda size: loss_picture(steps, loss, validation, run.bigram_nats, size))
        figures = [losses]
        rate = run.column("tokens_per_s")
        caption = "Tokens per second in each step, all ranks together. The time includes waiting, but not validation."
        throughput = Figure.of("Throughput", caption, lambda size: throughput_picture(steps, rate, size), half=True)
        others = [throughput, *_others(run)]
    else:
        figures = [Figure("Loss", "No step was completed, so there is no loss to show.")]
        others = [Figure("Throughput", "No step was completed, so there is no throughput to show.")]

    timeline = Figure("Timeline of a step", "The run stopped before a complete step was measured.")
    if run.trace is not None:
        plan = run.trace.plan
        found = boxes(plan, run.trace.spans, shown_in_run(plan))
        caption = (
            f"Step {run.trace.step:,} as measured. Each box is one micro-batch, forward and backward, labelled with "
            "its ring size and its tokens on that rank (K = 1,024) where they fit. Boxes that touch across rows share "
            "rings." + _passes_apart(plan) + some_ranks(found)
        )
        timeline = Figure.of("Timeline of a step", caption, lambda size: timeline_picture(found, size))

    # Sections without contents are left out.
    totals = table(run)
    numbers = Table("Key numbers of the run", totals) if totals else None
    tables = (numbers, mixture(run), about(run), differing(run), starts(run), nccl(run))
    return Page(
        title=run.config.recipe,
        kind="a ByteScale run",
        headline=headline.of_run(run.lines, run.speed),
        head=head(run),
        figures=[*figures, timeline, *others],
        tables=[one for one in tables if one],
        warning=warning(run),
    )


def _passes_apart(plan: StepPlan) -> str:
    """A sentence for the caption of a pipeline, else an empty string."""
    return " In a pipeline the two passes are separate boxes, on each stage." if plan.stages > 1 else ""


def _others(run: RunData) -> list[Figure]:
    """Draw the learning rate, the gradient norm and the memory of a run, as far as it has them."""
    steps, found = run.column("step"), []
    for name, title, label, caption, unit in (
        ("lr", "Learning rate", "learning rate", "The learning rate of each step.", 1),
        ("grad_norm", "Gradient norm", "gradient norm", "The norm of the gradient over all ranks, before clipping.", 1),
        ("peak_memory", "Memory", "GiB", "The most memory that a device had allocated in a step, of all ranks.", 2**30),
    ):
        values = run.column(name) / unit
        kept = values[np.isfinite(values)]
        if len(kept):
            curve = [Curve(title, steps, values)]
            spread = name == "grad_norm" and kept.min() > 0 and kept.max() > 30 * kept.min()
            picture = partial(
                curves_picture, name, title, curve, STEPS, label, log=spread, from_zero=name == "peak_memory"
            )
            found.append(Figure.of(title, caption, picture, half=True))
    return [*found, *data_plane(run)]


def data_plane(run: RunData) -> list[Figure]:
    """Draw the waits of the ranks, and the loaders of each source, as far as a run has them."""
    steps, found = run.column("step"), list[Figure]()
    waits = [
        Curve(name, steps, values)
        for name, values in (("for plans", run.column("plan_wait_s")), ("for data", run.column("data_wait_s")))
        if np.isfinite(values).any()
    ]
    if waits:
        caption = "Seconds of each step in which ranks waited for its plan, and for the tokens of its micro-batches."
        picture = partial(curves_picture, "waits", "Waits", waits, STEPS, "waits (s)", from_zero=True)
        found.append(Figure.of("Waits", caption, picture, half=True))
    if loaders := _loaders(run):
        caption = (
            "Of each source, the loaders that were at work, on average: processor time of the blocks packed in a step, "
            "over the time of the step. A block counts in the step in which it is done."
        )
        if run.loaders:
            caption += " all: how many loaders there are, on all hosts."
        picture = partial(curves_picture, "loaders", "Loaders by source", loaders, STEPS, "loaders", from_zero=True)
        found.append(Figure.of("Loaders by source", caption, picture, half=True))
    return found


def _loaders(run: RunData) -> list[Curve]:
    """The loaders of a run over its steps: of all sources, and those at work on the sources with most packing."""
    steps, step_s, found = run.column("step"), run.column("step_s"), list[Curve]()
    if run.loaders and len(steps):
        firsts, counts = (np.array(one) for one in zip(*run.loaders, strict=True))
        found.append(Curve("all", steps, counts[np.searchsorted(firsts, steps, side="right") - 1].astype(np.float64)))
    packed = [packed_of(line) for line in run.lines]
    total = Counter[str]()
    for line in packed:
        total.update({name: cost.seconds for name, cost in line.items()})
    for name, _ in total.most_common(_SOURCES):
        seconds = np.array([line[name].seconds if name in line else 0.0 for line in packed])
        found.append(Curve(name, steps, np.divide(seconds, step_s, out=np.zeros_like(seconds), where=step_s > 0)))
    return found


def head(run: RunData) -> list[Pair]:
    """The facts at the top of the page: model, ranks, planner, steps and last losses."""
    config, loss, parameters = run.config, run.column("loss"), run.summary.get("parameters")
    validated = [line["validation_loss"] for line in run.lines if line.get("validation_loss") is not None]
    validation = _nats(validated[-1]) if validated else "validation never ran"
    if validated and not math.isnan(run.bigram_nats):
        verdict = "below" if validated[-1] < run.bigram_nats else "not below"
        validation += f", {verdict} the corpus's bigram entropy of {run.bigram_nats:.3f}"
    pairs = [
        ("model", config.model.name + (f", {parameters:,} parameters" if parameters is not None else "")),
        ("ranks", ranks_of(run)),
        ("planner", config.planner.name),
        ("steps", f"{len(run.lines):,} of {config.run.steps:,}"),
        ("last training loss", _nats(loss[-1]) if len(loss) else "no step was completed"),
        ("last validation loss", validation),
    ]
    if lasted := duration(run):
        pairs.append(("duration", lasted))
    return [*pairs, ("mode", MODES[run.trace.plan.mode])] if run.trace else pairs


def table(run: RunData) -> list[Pair]:
    """Totals of all steps, and the speed; empty if no step was completed."""
    if not run.lines:
        return []
    degree, speed, seconds = run.column("max_degree"), run.speed, float(np.nansum(run.column("step_s")))
    rings, largest = int((degree >= 2).sum()), int(np.nanmax(degree, initial=0))

    def wait(name: str) -> str:
        waited = float(np.nansum(run.column(name)))
        return f"{waited:,.2f} s ({waited / seconds:.1%} of step time)" if seconds > 0 else f"{waited:,.2f} s"

    return [
        ("steps", f"{len(run.lines):,}"),
        ("tokens", f"{int(np.nansum(run.column('tokens'))):,}"),
        ("steps with a ring of 2 or more ranks", f"{rings:,} ({rings / len(degree):.0%})"),
        ("largest ring", f"{largest:,} ranks" if largest > 1 else "none"),
        ("median tokens/s", metric_text(speed, "tokens_per_s")),
        ("median step", metric_text(speed, "step_s")),
        ("median MFU", metric_text(speed, "mfu")),
        ("share of tokens in unsplit sequences", metric_text(speed, "unsplit")),
        ("wait for plans", wait("plan_wait_s")),
        ("wait for data", wait("data_wait_s")),
    ]


def about(run: RunData) -> Table:
    """The documents, hosts and versions of a run."""
    config, summary = run.config, run.summary
    documents = summary.get("documents")
    counts = "" if documents is None else f": {counted(int(documents), 'document')}"
    pairs = [("data", f"{config.data.place}{counts}"), ("tokenizer", config.data.tokenizer)]
    if config.run.weights is not None:
        pairs.append(("initial weights", config.run.weights))
    pairs.append(("run folder", config.run.out))
    if run.launches:
        last = run.launches[-1]
        more = f" and {len(last.hosts) - _HOSTS} more" if len(last.hosts) > _HOSTS else ""
        pairs += [
            ("command", last.command),
            ("hosts", f"{', '.join(last.hosts[:_HOSTS])}{more}"),
            ("system", last.system),
            ("versions", ", ".join(f"{name} {number}" for name, number in last.versions.items())),
        ]
    return Table("What was run", pairs, text=True)


def differing(run: RunData) -> Table:
    """The keys of the config that differ from the recipe's."""
    title, name = "Config, where it differs from the recipe", run.config.recipe
    if name not in recipes():
        return Table(title, [], note=f"{name} is not a packaged recipe; resolved.yaml has all values.")
    try:
        changed = differences([load([f"recipe={name}"]), run.config])
    except ConfigError as error:
        return Table(title, [], note=f"The recipe {name} of this version cannot be loaded: {error}")
    rows = [(key, *value_texts(key, values)) for key, values in changed.items()]
    if not rows:
        return Table(title, [], note=f"Nowhere: all values are those of the recipe {name}.")
    return Table(title, rows, ("key", f"recipe {name}", "this run"), text=True)


def starts(run: RunData) -> Table | None:
    """The starts of the ranks: when, how long, and how each ended; None without a record of them."""
    if not run.launches:
        return None
    rows = []
    for number, one in enumerate(run.launches, start=1):
        began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(one.began))
        lasted = "-" if one.ended is None else long_seconds(one.ended - one.began)
        outcome = one.outcome or "all steps are done"
        if one.ended is None:
            outcome = "running" if run.running and one is run.launches[-1] else "no end was recorded"
        rows.append((str(number), began, lasted, f"{one.step:,}", f"{one.ranks:,}", outcome))
    return Table("Starts", rows, ("start", "began", "lasted", "from step", "ranks", "end"), text=True)


def nccl(run: RunData) -> Table | None:
    """The operation of NCCL that could not end in the last start; None if no records show one."""
    if run.nccl is None:
        return None
    note = "From logs/nccl-rank-*, which ranks write when a run hangs; `torchfrtrace` of PyTorch shows all operations."
    return Table("NCCL", [("could not end", run.nccl)], note=note, text=True)


def ranks_of(run: RunData) -> str:
    """The HDP ranks of the measured step, else of the config, with the devices per rank if there are several."""
    tp, pp = run.config.parallel.tp, run.config.parallel.pp
    ranks = run.trace.plan.ranks if run.trace else Job(run.config).cluster.ranks // (tp * pp)
    return f"{ranks:,}" if tp * pp == 1 else hdp_ranks(ranks, tp, pp)


def duration(run: RunData) -> str | None:
    """How long ranks ran, in all starts; None if no end was recorded."""
    lasted = [one.ended - one.began for one in run.launches if one.ended is not None]
    return long_seconds(sum(lasted)) if lasted else None


def mixture(run: RunData) -> Table | None:
    """The tokens of each source after the last step, and those that `data.mix` wanted; None with fewer than two."""
    found: Mapping[str, Mapping[str, float]] = run.lines[-1].get("mixture", {}) if run.lines else {}
    tokens, wanted = (sum(one[key] for one in found.values()) for key in ("tokens", "wanted"))
    if not tokens:
        return None
    rows = []
    for name, one in found.items():
        shares = (f"{one[key] / total:.2%}" for key, total in (("tokens", tokens), ("wanted", wanted)))
        ahead = f"{one['tokens'] - one['wanted']:+,.0f}"
        rows.append((name, f"{one['tokens']:,.0f}", f"{one['wanted']:,.0f}", ahead, *shares))
    columns = ("source", "tokens", "wanted", "ahead", "share", "wanted share")
    note = (
        "Wanted: the tokens that the weights of data.mix give a source in all steps; of a source that was dropped, "
        "those that it had. Ahead: tokens minus wanted tokens, at most those of the source's longest document."
    )
    return Table("Mixture of the sources", rows, columns, note)


def warning(run: RunData) -> str | None:
    """A sentence about steps whose loss is not finite, or None."""
    bad = np.flatnonzero(~np.isfinite(run.column("loss")))
    if len(bad) == 0:
        return None
    first = run.lines[int(bad[0])]["step"]
    return f"The loss is not finite in {len(bad):,} of {counted(len(run.lines), 'step')}, first in step {first:,}."


def _nats(loss: float) -> str:
    return f"{loss:.3f} nats per token" if math.isfinite(loss) else "not finite"


def write_report(folder: Path) -> Path:
    """Write RUN/report.html atomically from the contents of the run folder, and return its path.

    Raises ConfigError and StorageError as `read_run` does.
    """
    path = RunFolder(folder).report
    write_durably(path, run_page(read_run(folder)).html().encode())
    return path
