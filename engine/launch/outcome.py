"""The messages of a run: at its start the model, ranks and documents, at its end the result and its page."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from engine import interrupts
from engine.config.explain.toys import toys
from engine.config.schema import Config
from engine.config.sources import source_configs
from engine.config.units import counted
from engine.data.overview import Corpora
from engine.errors import BytescaleError
from engine.launch.launch import Launch
from engine.launch.prepare import Start
from engine.launch.say import Say
from engine.launch.tail import left_out_so_far
from engine.report.headline import of_run
from engine.run import metrics
from engine.run.folder import RunFolder
from engine.run.launches import read_launches
from engine.run.speed import Speed
from engine.simulator.hollow import small_corpus

_EXHAUSTED = {"repeat": "repeat them", "drop": "drop the source", "stop": "stop the run"}


def facts(launch: Launch, corpora: Corpora, parameters: int) -> Iterator[str | None]:
    """Yield lines that describe the model, the ranks and the documents, and settings that may be errors."""
    config, ranks = launch.job.config, counted(launch.job.cluster.ranks, "rank")
    yield f"recipe {config.recipe}: {parameters:,} parameters, {ranks}, {counted(config.run.steps, 'step')}"
    yield toys(config, "model", "documents")
    known = corpora.overview
    pattern = f" matching {config.data.pattern}" if config.data.format == "folder" else ""
    skipped = [counted(known.empty, "empty one")] if known and known.empty else []
    skipped += [f"{known.dropped:,} by data.transform"] if known and known.dropped else []
    left_out = f" (skipped {' and '.join(skipped)})" if skipped else ""
    size = "not counted; blocks are read when they are needed"
    number = f"{known.training + known.validation:,}{left_out}" if known else size
    yield f"documents of {config.data.place}{pattern}: {number}"
    yield _exhausted(config, [corpus.name for corpus in corpora.sources if corpus.share < 1])
    warm_up, steps = config.optimizer.warmup_steps, config.run.steps
    if steps < warm_up:
        yield f"optimizer.warmup_steps={warm_up} is more than run.steps={steps}: optimizer.lr is never reached"
    yield from map(str, small_corpus(config, corpora.tokens))


def _exhausted(config: Config, trained: Sequence[str]) -> str:
    """Describe what is done when all documents of a source were used, for the sources that are trained on."""
    of_policy = dict[str, list[str]]()
    for name, source in source_configs(config.data).items():
        if name in trained:
            of_policy.setdefault(source.exhausted, []).append(name)
    one = len(of_policy) == 1
    done = (_EXHAUSTED[policy] + ("" if one else f" ({', '.join(names)})") for policy, names in of_policy.items())
    return f"when all documents of a source were used (data.exhausted): {', '.join(done)}"


def outcome(launch: Launch, start: Start) -> dict[str, Any]:
    """Write the report, say how the run ended, and return what the command prints as JSON.

    `start` is the last start of the ranks.
    """
    config, folder, say = launch.job.config, launch.folder, launch.say
    lines = metrics.read_metrics(folder.metrics)
    # A crash may have lost the line of the last step. Then do not report an older step's loss as the result.
    last = lines[-1] if lines and lines[-1]["step"] >= start.step else {"step": start.step, "loss": None}
    validated = [line["validation_loss"] for line in lines if "validation_loss" in line]
    known = start.corpora.overview
    report, bigram_nats = write_page(folder, say), known and known.bigram_nats
    speed = Speed.of(lines, [one.step for one in read_launches(folder.launches)])
    if speed is not None:
        headline = of_run(lines, speed)
        say(f"{headline.figure}: {headline.text}")
    # A model that is not better than counts of pairs of tokens has learned little, whatever its loss.
    if validated and bigram_nats is not None:
        verdict = "below" if validated[-1] < bigram_nats else "not below"
        bigram = f"the bigram entropy of the corpus, {bigram_nats:.3f}"
        say(f"validation loss {validated[-1]:.3f} nats per token, {verdict} {bigram}")
    if left_out := (lines[-1].get("left_out") if lines else None):
        say(left_out_so_far(left_out, folder))
    for name, one in (lines[-1].get("waiting", {}) if lines else {}).items():
        counts = f"{one['waiting']:,} wait for a later segment of data.mix, {one['left_out']:,} are left out"
        say(f"documents of {name} that were passed over because of their lengths: {counts}")
    if start.plans and (ended := last.get("ended")):  # else the outlook has reported it
        say(f"{folder.root}: the run ended after step {last['step']} of run.steps={config.run.steps}: {ended}")
    if report:
        say(f"report: {report}")
    return {
        "train": {
            "steps": last["step"],
            "loss": last["loss"],
            "validation_loss": validated[-1] if validated else None,
            "bigram_nats": bigram_nats,
            "tokens_per_s": None if speed is None else speed.tokens_per_s,
            "mfu": None if speed is None else speed.mfu,
            "unsplit": None if speed is None else speed.unsplit,
            "report": report,
            "out": str(folder.root),
        }
    }


def write_page(folder: RunFolder, say: Say) -> str | None:
    """Write the report and return its path; None without metrics, or if it fails, which does not fail the run."""
    try:
        # Imported here, after the ranks: matplotlib is slow to import, and a failure must not fail the run.
        from engine.report.run_page import write_report

        return str(write_report(folder.root)) if metrics.read_metrics(folder.metrics) else None
    except (Exception, KeyboardInterrupt) as error:  # whatever it is, the user must see how the run itself ended
        what = error.problems[0].key if isinstance(error, BytescaleError) else type(error).__name__
        why = f"{what}: {error}"
        if isinstance(error, OSError) and error.strerror:
            why = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        if interrupts.is_interrupt(error):
            interrupts.answered()
            why = f"interrupted; `bytescale report {shlex.quote(str(folder.root))}` writes it"
        say(" ".join(f"the report could not be written: {why}".split()))
        return None
