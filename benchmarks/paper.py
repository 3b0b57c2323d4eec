"""Simulates the table of the ByteScale paper: speed-ups over the static mesh, next to the published ones.

`python benchmarks/paper.py case` prints the case study that paper.yaml is fitted to, `table` the table (`table
llama70b`: the rows of one model), `ablation` the speed-ups of all variants from static to adaptive, and `offload`,
likewise, each planner's gain from offload on Byted at 2M. benchmarks/pipelines.py shows the idle time of the 70B rows.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from engine.config.load import load
from engine.config.yaml_reader import parse
from engine.cost.calibration import Calibration
from engine.cost.datasheets import nominal
from engine.cost.model import Costs
from engine.data.mixes import draw
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
    costs = replace(Costs.of(config, _machine()), step=0)  # `seconds` adds the assumed step_s
    return replace(PlanSettings.of(config), costs=costs)


def _machine() -> Calibration:
    """The assumed rates of paper.yaml; other rates are those of the A100's data sheet."""
    names = (
        "attention_flops_per_s",
        "network_bytes_per_s",
        "linear_flops_per_s",
        "node_bytes_per_s",
        "linear_backward",
        "attention_backward",
        "copy_bytes_per_s",
        "round_s",
        "ring_s",
    )
    assumed: dict[str, Any] = {name: float(ASSUMED[name]) for name in names}
    return replace(nominal("a100x8"), **assumed)


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


def case() -> None:
    """Print the case study."""
    settings, steps = replace(settings_of("llama7b", "2M"), offload=0), steps_of("llama7b", "byted", "2M")
    for planner, said in (("static", 520), ("naive", 272), ("balanced", 157), ("adaptive", None)):
        print(f"{planner}: {seconds(steps, settings.by(planner)):.0f} s, the paper {said or '-'}", flush=True)


def table(*models: str) -> None:
    """Print the rows of these models, or all."""
    within = 0
    for (model, mix), row in PAPER.items():
        if models and model not in models:
            continue
        before: list[float] = []
        for context, (naive, balanced) in zip(CONTEXTS, row, strict=True):
            settings, steps = replace(settings_of(model, context), offload=0), steps_of(model, mix, context)
            found = [seconds(steps, settings.by(planner)) for planner in PLANNERS]
            ours = [found[0] / time for time in found]
            off = (ours[1] / naive - 1, ours[2] / balanced - 1)
            within += sum(abs(one) <= 0.3 for one in off) if model == "llama7b" else 0
            falls = " ".join(f"{now / then:.2f}" for then, now in zip(before, found, strict=False))
            print(
                f"{model} {mix} {context}: naive {ours[1]:.2f} (paper {naive}, {off[0]:+.0%}) "
                f"balanced {ours[2]:.2f} (paper {balanced}, {off[1]:+.0%}) adaptive {ours[3]:.2f}; "
                f"seconds {' '.join(f'{time:.1f}' for time in found)}; slowdown since the previous context {falls}",
                flush=True,
            )
            before = found
    if not models:
        print(f"figures of 7B within 30 %: {within} of 16")


def ablation() -> None:
    """Print the speed-ups from the static mesh to adaptive, 7B on Byted at 2M."""
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
        print(f"{name}: {baseline / seconds(steps, one):.2f}", flush=True)


def offload(*models: str) -> None:
    """Print each planner's gain from offload on Byted at 2M, its host memory, and the lower bounds, of these or all."""
    for model in models or ASSUMED["devices"]:
        settings, steps = settings_of(model, "2M"), steps_of(model, "byted", "2M")
        none = settings.without_offload()
        for planner in PLANNERS[1:]:
            before, after = (seconds(steps, one.by(planner)) for one in (none, settings))
            host = max(host_bytes(plan_step(lengths, settings.by(planner)), settings) for lengths in steps)
            print(
                f"{model} {planner}: {before:.1f} -> {after:.1f} s, {before / after:.3f}; host {host / 2**30:.1f} GiB"
            )
        bounds = [sum(lower_bound(lengths, one) for lengths in steps) for one in (none, settings)]
        useful = (
            sum(int(settings.costs.sequence(lengths).sum()) for lengths in steps) / settings.ranks / settings.stages
        )
        over = ", ".join(f"{bound / useful:.3f}" for bound in bounds)
        print(f"{model}: lower bound / mean unsplit work of a rank, without and with offload: {over}", flush=True)


if __name__ == "__main__":
    {"case": case, "table": table, "ablation": ablation, "offload": offload}[sys.argv[1]](*sys.argv[2:])
