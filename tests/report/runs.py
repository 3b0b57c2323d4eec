"""Writes run folders without training: real plans with simulated spans, and invented metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from engine.config.load import load, resolved_yaml
from engine.planner.make import plan_step
from engine.planner.plan.step_plan import StepPlan
from engine.planner.settings import PlanSettings
from engine.report.boxes import Span
from engine.simulator.timeline import simulate
from tests.planner import samples

BIGRAM_NATS = 2.432


def plan(
    ranks: int, sequences: int | None = None, mode: str = "free", settings: PlanSettings | None = None
) -> StepPlan:
    """The plan of a batch of long-tailed lengths, the longest on half of the ranks; capacity 1K."""
    settings = settings or samples.settings(ranks=ranks, capacity=1024, mode=mode, max_peers=8)
    longest = 512 * (ranks + 1)
    lengths = np.random.default_rng(7).lognormal(6, 1.5, sequences or 6 * ranks).astype(np.int64)
    step = np.append(np.clip(lengths, 1, longest), longest)
    return plan_step(step, settings)


def spans(plan: StepPlan) -> list[Span]:
    """When each micro-batch of the plan runs in the simulator, scaled to a step of 3.2 s."""
    line = simulate(plan, samples.settings(ranks=plan.ranks, stages=plan.stages))
    second = line.makespan / 3.2
    rows = zip(line.rank.tolist(), line.micro_batch.tolist(), line.start.tolist(), line.stop.tolist(), strict=True)
    return [Span(rank, micro, start / second, stop / second) for rank, micro, start, stop in rows]


def metrics(steps: int) -> list[dict[str, Any]]:
    """The metrics of a run that learns: a line per step, with validation every tenth step."""
    noise = np.random.default_rng(3).normal(0, 0.1, steps).tolist()
    return [_line(step, 2.1 + 3.4 / (1 + step / 12) + off, off) for step, off in enumerate(noise, start=1)]


def _line(step: int, loss: float, off: float) -> dict[str, Any]:
    line = {
        "step": step,
        "loss": loss,
        "tokens": 16000 + step,
        "tokens_per_s": 7000 + 3000 * off,
        "step_s": 2.25,
        "plan_wait_s": 0.001,
        "data_wait_s": 0.004,
        "max_degree": 2 - step % 2,
        "balance": 0.95,
        "grad_norm": 1.0,
        "lr": 0.002,
    }
    return line | ({"validation_loss": loss + 0.05} if step % 10 == 0 else {})


def write_run(
    folder: Path, *, overrides: tuple[str, ...] = (), lines: list[dict[str, Any]], traced: StepPlan | None
) -> Path:
    """Write a run folder; without `traced`, of a run that stopped before a step was measured."""
    folder.mkdir(exist_ok=True)
    (folder / "resolved.yaml").write_text(resolved_yaml(load(["run.steps=120", *overrides])))
    facts = {"bigram_nats": BIGRAM_NATS, "documents": 9, "empty_documents": 0, "validation_documents": 1}
    (folder / "summary.json").write_text(json.dumps(facts | {"parameters": 804480}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if traced is not None:
        (folder / "plan.bin").write_bytes(traced.to_bytes())
        (folder / "trace.json").write_text(json.dumps({"step": 7, "spans": spans(traced)}))
    return folder
