"""Simulates the table of the ByteScale paper: speed-ups over the static mesh, next to the published ones.

`python benchmarks/paper.py case` prints the case study that paper.yaml is fitted to, `table` the table (with a model,
`table/llama70b`, its rows), `ablation` the speed-ups of all variants from static to adaptive, and `offload`,
likewise, each planner's gain from offload on Byted at 2M. benchmarks/pipelines.py shows the idle time of the 70B rows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import driver
from engine.config.load import load
from engine.config.yaml_reader import parse
from engine.cost.calibration import Calibration, alike
from engine.cost.datasheets import nominal
from engine.cost.model import Costs
from engine.data.mixes import draw
from engine.job import Job
from engine.planner.adaptive.workload import lower_bound
from engine.planner.make import plan_step
from engine.planner.settings import PlanSettings
from engine.simulator.facts import host_bytes
from engine.simulator.timeline import simulate
from engine.units import Ints

ASSUMED: dict[str, Any] = parse((Path(__file__).parent / "paper.yaml").read_text(encoding="utf-8"), "paper.yaml")
CONTEXTS = ("256K", "512K", "1M", "2M")
PAPER = {  # published speed-ups over static, (naive, balanced) for each of CONTEXTS
    ("llama7b", "github"): ((1.28, 1.73), (1.51, 2.49), (2.25, 4.56), (3.96, 7.89)),
    ("llama7b", "byted"): ((1.23, 1.68), (1.42, 1.98), (1.61, 2.34), (2.43, 4.26)),
    ("llama30b", "github"): ((1.18, 1.54), (1.28, 2.07), (2.15, 3.48), (3.39, 6.21)),
    ("llama70b", "github"): ((1.19, 1.41), (1.41, 1.89), (1.98, 3.05), (2.45, 4.28)),
}
PLANNERS = ("static", "naive", "balanced", "adaptive")


def settings_of(model: str, context: str) -> PlanSettings:
    """Settings of a model and a context under the assumptions of paper.yaml."""
    assumed = ASSUMED
    config = load(
        [
            "recipe=llama7b-2m",
            f"model={model}",
            "cluster=a100x8",
            f"cluster.nodes={assumed['devices'][model] // 8}",
            f"cluster.device_memory={assumed['device_memory']}",
            "cluster.host_memory=64TiB",
            f"model.heads={assumed['heads'][model]}",
            f"model.kv_heads={assumed['kv_heads'][model]}",
            f"parallel.tp={assumed['tensor_parallel'][model]}",
            f"parallel.pp={assumed['pipeline'][model]}",
            f"context={context}",
            f"capacity={assumed['capacity']}",
            f"batch_tokens={assumed['batch_tokens']}",
        ]
    )
    job = Job(config)
    costs = replace(Costs.of(config, job.cluster, _machine()), step=0)  # `seconds` adds the assumed step_s
    return replace(job.settings, costs=costs)


def _machine() -> Calibration:
    """The assumed rates of paper.yaml; other rates are those of the A100's data sheet."""
    names = (
        "attention_flops_per_s",
        "network_bytes_per_s",
        "node_bytes_per_s",
        "linear_backward",
        "attention_backward",
        "copy_bytes_per_s",
        "round_s",
        "ring_s",
    )
    assumed: dict[str, Any] = {name: float(ASSUMED[name]) for name in names}
    return replace(nominal("a100x8"), **assumed, **alike(float(ASSUMED["linear_flops_per_s"])))


def steps_of(model: str, mix: str, context: str) -> list[Ints]:
    """Sequence lengths of the steps that every planner plans, an array per step."""
    config = load(
        ["recipe=llama7b-2m", f"lengths={mix}", f"context={context}", f"batch_tokens={ASSUMED['batch_tokens']}"]
    )
    return [draw(config.lengths, config.batch_tokens, config.context, seed) for seed in range(ASSUMED["steps"])]


def seconds(steps: list[Ints], settings: PlanSettings) -> float:
    """Plan and simulate the steps; return their mean time in seconds, with the assumed fixed time."""
    times = [simulate(plan_step(lengths, settings), settings).makespan for lengths in steps]
    return float(np.mean(times)) / 1e9 + ASSUMED["step_s"]


def cases(arguments: argparse.Namespace) -> Iterator[driver.Case]:
    yield "case", case
    for model, mix in PAPER:
        yield f"table/{model}/{mix}", partial(table, model, mix)
    yield "ablation", ablation
    for model in ASSUMED["devices"]:
        yield f"offload/{model}", partial(offload, model)


def case() -> Iterator[driver.Row]:
    """Yield the seconds of the case study, ours and the paper's."""
    settings, steps = replace(settings_of("llama7b", "2M"), offload=0), steps_of("llama7b", "byted", "2M")
    for planner, published in (("static", 520), ("naive", 272), ("balanced", 157), ("adaptive", None)):
        yield {"planner": planner, "s": seconds(steps, settings.by(planner)), "paper_s": published}


def table(model: str, mix: str) -> Iterator[driver.Row]:
    """Yield a row of the table for each context: speed-ups over static, the paper's, and how far ours are from it."""
    before: list[float] = []
    for context, (naive, balanced) in zip(CONTEXTS, PAPER[model, mix], strict=True):
        settings, steps = replace(settings_of(model, context), offload=0), steps_of(model, mix, context)
        found = [seconds(steps, settings.by(planner)) for planner in PLANNERS]
        row: driver.Row = {"model": model, "mix": mix, "context": context}
        for planner, time in zip(PLANNERS, found, strict=True):
            row |= {f"{planner}_s": time, planner: found[0] / time}
        row |= {"naive_paper": naive, "balanced_paper": balanced}
        row |= {f"{planner}_off_%": 100 * (row[planner] / row[f"{planner}_paper"] - 1) for planner in PLANNERS[1:3]}
        yield row | {"slowdowns": [now / then for then, now in zip(before, found, strict=False)]}
        before = found


def summary(rows: list[driver.Row]) -> driver.Row:
    """How many of the table's figures of 7B are within 30 % of the paper's."""
    ours = [row for row in rows if row.get("model") == "llama7b" and "naive_off_%" in row]
    off = [row[f"{planner}_off_%"] for row in ours for planner in PLANNERS[1:3]]
    return {"7B within 30 %": f"{sum(abs(one) <= 30 for one in off)} of {len(off)}"} if off else {}


def ablation() -> Iterator[driver.Row]:
    """Yield the speed-ups from the static mesh to adaptive, 7B on Byted at 2M."""
    settings, steps = settings_of("llama7b", "2M"), steps_of("llama7b", "byted", "2M")
    none = replace(settings, offload=0)
    runs = (
        ("static", none.by("static")),
        ("dynamic communication (naive)", none.by("naive")),
        ("+ offload, equation 3 taken literally", settings.by("naive")),
        ("+ balance, without offload", none.by("balanced")),
        ("+ balance, equation 3 taken literally", settings.by("balanced")),
        ("adaptive without offload", none.by("adaptive")),
        ("adaptive with offload", settings.by("adaptive")),
    )
    baseline = seconds(steps, runs[0][1])
    for name, one in runs:
        yield {"variant": name, "over_static": baseline / seconds(steps, one)}


def offload(model: str) -> Iterator[driver.Row]:
    """Yield each planner's gain from offload on Byted at 2M and its host memory; then the lower bounds.

    Those are relative to the mean unsplit work of a rank, without and with offload.
    """
    settings, steps = settings_of(model, "2M"), steps_of(model, "byted", "2M")
    none = settings.without_offload()
    for planner in PLANNERS[1:]:
        before, after = (seconds(steps, one.by(planner)) for one in (none, settings))
        host = max(host_bytes(plan_step(lengths, settings.by(planner)), settings) for lengths in steps)
        figures = {"without_s": before, "with_s": after, "gain": before / after, "host_gib": host / 2**30}
        yield {"model": model, "planner": planner, **figures}
    useful = sum(int(settings.costs.sequence(lengths).sum()) for lengths in steps) / settings.ranks / settings.stages
    without, with_ = (sum(lower_bound(lengths, one) for lengths in steps) / useful for one in (none, settings))
    yield {"model": model, "bound_without": without, "bound_with": with_}


if __name__ == "__main__":
    sys.exit(driver.main(__doc__, cases, summary=summary))
