"""The page of a simulation: planners side by side, and a step of each on imagined ranks."""

from __future__ import annotations

from collections.abc import Sequence

from engine.config.schema import Config
from engine.planner.make import plan_step
from engine.planner.plan import Ints
from engine.planner.settings import PlanSettings
from engine.report.bars import Run, seconds_picture, speedup_picture
from engine.report.boxes import simulated
from engine.report.page import Figure, Page, Table
from engine.report.timeline import some_ranks, timeline_picture
from engine.report.words import NAMES, cell, short_tokens, source

_ROWS = 24  # ranks in each of several timelines
_COLUMNS = ("step_s", "tokens_per_s", "speedup", "compute_s", "exposed_comm_s", "bubble", "mfu")


def simulation_page(config: Config, runs: Sequence[Run], lengths: Ints) -> Page:
    """Return the page of runs; `config` is that of the first sweep point, `lengths` [S] are its first step's.

    That step is planned once more under each planner: a run keeps no plans.
    """
    return Page(
        title=config.recipe,
        kind="a ByteScale simulation",
        head=_head(config, runs),
        figures=[_speedups(runs), _seconds(runs), *_timelines(config, runs, lengths)],
        tables=[_table(runs)],
    )


def _head(config: Config, runs: Sequence[Run]) -> list[tuple[str, str]]:
    settings = PlanSettings.of(config)
    steps = int(runs[0]["steps"])
    pairs = [
        ("model", config.model.name),
        ("cluster", f"{config.cluster.name}, {settings.mode} mode"),
        ("rates", settings.costs.source),
        ("steps", f"means over {steps:,} steps" if steps > 1 else "one step"),
    ]
    if "sweep" not in runs[0]:
        return [
            *pairs,
            ("ranks", f"{settings.ranks:,}"),
            ("lengths", source(config)),
            ("context", f"{short_tokens(config.context)} tokens"),
        ]
    return [*pairs, ("sweep", f"{len({run['sweep'] for run in runs}):,} points")]


def _speedups(runs: Sequence[Run]) -> Figure:
    caption = "How many times faster a step is than with the fixed mesh (static) of the same point, on the same steps."
    return Figure.of("Speed-up", caption, lambda size: speedup_picture(runs, size))


def _seconds(runs: Sequence[Run]) -> Figure:
    caption = (
        "What ranks do in a step, in the mean: compute, wait for nothing but transfers, reduce gradients and update "
        "weights, or wait for other ranks (the bubble)."
    )
    return Figure.of("Where the time goes", caption, lambda size: seconds_picture(runs, size))


def _timelines(config: Config, runs: Sequence[Run], lengths: Ints) -> list[Figure]:
    """Return the first step under each planner, all on one scale of time."""
    settings = PlanSettings.of(config)
    names = list(dict.fromkeys(str(run["planner"]) for run in runs))
    found = {name: simulated(plan_step(lengths, settings.by(name)), settings.by(name), _ROWS) for name in names}
    until = max(each.end_s for each in found.values())
    point = f" of {runs[0]['sweep']}" if "sweep" in runs[0] else ""

    def figure(name: str) -> Figure:
        caption = f"The first step{point} by {name}, on the same scale as the others; hatched ends wait for transfers."
        each = found[name]
        draw = lambda size: timeline_picture(each, size, key=f"timeline-{name}", until_s=until)  # noqa: E731
        return Figure.of(f"Timeline: {name}", caption + some_ranks(each), draw)

    return [figure(name) for name in names]


def _table(runs: Sequence[Run]) -> Table:
    swept = ["sweep"] if "sweep" in runs[0] else []
    columns = ["planner", *swept, "ranks", "context", "lengths", *_COLUMNS]
    rows = [[cell(run, column) for column in columns] for run in runs]
    return Table("The runs in numbers", rows, [NAMES.get(name, name) for name in columns])
