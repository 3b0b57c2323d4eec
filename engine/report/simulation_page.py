"""The page of `simulate`: a comparison of planners, and the timeline of one simulated step of each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from engine.config.schema import BASELINE, Config
from engine.planner.make import plan_step
from engine.planner.settings import PlanSettings
from engine.report import headline
from engine.report.boxes import degree_groups, simulated
from engine.report.charts import Run, seconds_picture, speedup_picture
from engine.report.chrome_trace import Process, simulated_steps
from engine.report.page import Figure, Page, Table
from engine.report.timeline import some_ranks, timeline_picture
from engine.report.words import MODES, NAMES, cell, hdp_ranks, short_seconds, short_tokens, source, without_address
from engine.simulator.compare import TUNED
from engine.units import Ints

_ROWS = 24  # ranks in each of several timelines
_HEIGHT = 320.0  # pixels of all rows of one of them
_COLUMNS = ("step_s", "tokens_per_s", "speedup", "speedup_tuned", "compute_s", "exposed_comm_s", "bubble", "mfu")
_NOTE = (
    "Bubble: fraction of the step during which a rank is idle: it waits for other ranks or pipeline stages, or for "
    "weights that ZeRO-3 gathers. MFU: model FLOPs divided by the peak FLOPs of all devices."
)


def simulation_page(
    config: Config, runs: Sequence[Run], lengths: Ints, compared: Mapping[str, PlanSettings], tune: str
) -> Page:
    """Build the page of simulated runs.

    `config` and `compared`, the settings of each row by its label, are those of the first simulated sweep point;
    `lengths` [S] are those of its first step. Runs do not contain their plans, so this step is planned again by each
    planner for the timelines. `tune` is the command that searches faster settings for another planner than static.
    """
    settings = compared[BASELINE]
    # Rows are named by their labels, because a planner may have several rows.
    named = [{**run, "planner": run["label"]} for run in runs]
    steps = int(runs[0]["steps"])
    head = [
        ("model", config.model.name),
        ("cluster", config.cluster.name),
        ("mode", MODES[settings.mode]),
        ("hardware rates", without_address(settings.costs.source)),
        ("steps", f"means over {steps:,} steps" if steps > 1 else "one step"),
    ]
    swept = ["sweep"] if "sweep" in runs[0] else []
    if swept:  # points may differ in ranks, lengths and context, which are columns of the table
        head += [("sweep", f"{len({run['sweep'] for run in runs}):,} points")]
    else:
        head += [
            ("ranks", hdp_ranks(settings.ranks, config.parallel.tp, config.parallel.pp)),
            ("lengths", source(config)),
            ("context", f"{short_tokens(config.context)} tokens"),
        ]

    columns = ["planner", *swept, "ranks", "context", "lengths", *(name for name in _COLUMNS if name in runs[0])]
    rows = [[cell(run, column) for column in columns] for run in named]
    # The page compares with the strongest baseline that was simulated.
    over = TUNED if any(run["tuned"] for run in runs) else BASELINE
    mesh = "at the settings with which it is the fastest" if over == TUNED else "with the settings of the config"
    speed = f"Step time of the fixed mesh, static, {mesh}, divided by that of the row, for the same steps."
    if over == TUNED:
        best = [f"{run['set']}{'' if run['complete'] else ' (search incomplete)'}" for run in runs if run["tuned"]]
        speed += f" Its settings: {'; '.join(dict.fromkeys(best))}."
    against = [{**run, "speedup": run.get("speedup_tuned") or run["speedup"], "over": over} for run in named]
    time = (
        "How ranks spend a step, on average: they compute, wait for transfers, reduce gradients and update weights, or "
        "are idle (the bubble)."
    )
    return Page(
        title=config.recipe,
        kind="a ByteScale simulation",
        headline=headline.of_simulation(runs, tune),
        head=head,
        figures=[
            Figure.of("Speed-up", speed, partial(speedup_picture, against)),
            Figure.of("Where the time goes", time, partial(seconds_picture, named)),
            *_timelines(compared, runs, lengths),
        ],
        tables=[Table("Key numbers of the runs", rows, [NAMES.get(name, name) for name in columns], _NOTE)],
    )


def simulated_planners(lengths: Ints, compared: Mapping[str, PlanSettings]) -> list[Process]:
    """Simulate the first step with the settings of each row for a trace; arguments as of `simulation_page`."""
    plans = {label: plan_step(lengths, own) for label, own in compared.items()}
    return [Process(label, simulated_steps([plan], compared[label])) for label, plan in plans.items()]


def _timelines(compared: Mapping[str, PlanSettings], runs: Sequence[Run], lengths: Ints) -> list[Figure]:
    """Draw the timeline of the first step for each row, in the same colours, each on its own time scale.

    On one scale, the boxes of the fastest would be too small to see.
    """
    found = {label: simulated(plan_step(lengths, own), own, _ROWS) for label, own in compared.items()}
    groups = degree_groups(np.concatenate([each.degree for each in found.values()]))
    point = f" of {runs[0]['sweep']}" if "sweep" in runs[0] else ""

    figures = []
    for label, each in found.items():
        text = (
            f"The first step{point}, planned by {label}: {short_seconds(each.end_s)} until the last rank finishes. "
            "Each timeline has its own scale. Hatched: waits for transfers."
        )
        key = f"timeline-{re.sub(r'[^a-z0-9]+', '-', label)}"
        picture = partial(timeline_picture, each, key=key, groups=groups, height=_HEIGHT)
        figures.append(Figure.of(f"Timeline: {label}", text + some_ranks(each), picture, half=True))
    return figures
