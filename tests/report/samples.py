"""A picture of each kind with invented numbers, and the positions of its texts."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from engine.config.load import load
from engine.fit.estimate import estimate
from engine.job import Job
from engine.planner.plan.step_plan import StepPlan
from engine.planner.settings import PlanSettings
from engine.report.boxes import Boxes, boxes
from engine.report.charts import (
    CostCurve,
    cost_picture,
    histogram_picture,
    loss_picture,
    seconds_picture,
    speedup_picture,
    throughput_picture,
)
from engine.report.memory_page import memory_picture
from engine.report.svg import Size
from engine.report.timeline import timeline_picture
from tests.planner.samples import COSTS, settings, staged_costs
from tests.presets import LLAMA7B_2M
from tests.report.runs import plan, spans

STEPS = np.arange(1.0, 41.0)
LOSS = 5 / np.sqrt(STEPS)
VALIDATION = np.where(STEPS % 10 == 0, LOSS, np.nan)
BUCKETS = [{"upto": 2**p, "samples": 40 - p, "tokens": p**3} for p in range(3, 22)]
MARKS = {"p50": 800, "p90": 900, "p99": 70_000, "suggested capacity": 65536}
RING = np.array([4000, 9000, 70_000, 2_000_000])
COST_CURVE = CostCurve(
    lengths=2 ** np.arange(4, 22),
    unsplit_s=1e-6 * 4.0 ** np.arange(18),
    ring_length=RING,
    ring_degree=np.array([2, 3, 3, 300]),
    ring_s=RING / 1e5,
    capacity=8192,
    step_s=32.4,
)
_SEVEN_B = load([*LLAMA7B_2M, "offload.ratio=0"])
ESTIMATE = estimate(Job(_SEVEN_B))


def runs(*sweeps: str) -> list[dict[str, Any]]:
    """Runs of static and adaptive at each sweep point, as `simulate` returns them; without points, no sweep."""
    parts = {"compute_s": 20.0, "exposed_comm_s": 5.0, "mfu": 0.3, "tokens_per_s": 1e6, "steps": 2}
    shared = parts | {"ranks": 64, "context": 8192, "lengths": "byted"}
    static = shared | {"planner": "static", "step_s": 80.0, "speedup": 1.0, "bubble": 0.6}
    adaptive = shared | {"planner": "adaptive", "step_s": 32.0, "speedup": 2.5, "bubble": 0.1}
    return [{"sweep": sweep} | run if sweep else run for sweep in sweeps or ("",) for run in (static, adaptive)]


SWEPT = runs("context=256K lengths=github cluster.nodes=128 cluster.ranks_per_node=8", "context=2M")


def all_boxes(made: StepPlan) -> Boxes:
    return boxes(made, spans(made), np.arange(made.ranks))


def slow_links(ranks: int, mode: str) -> PlanSettings:
    """Settings in which rings wait for transfers."""
    rates = COSTS.rates._replace(kv=3000.0, dkv=6000.0)
    stages = 2 if mode == "pipeline" else 1
    own = settings("adaptive", ranks=ranks, capacity=1024, mode=mode, max_peers=8, stages=stages)
    return replace(own, costs=staged_costs(stages, replace(COSTS, rates=rates)))


PICTURES: dict[str, Callable[[Size], str]] = {
    "loss": lambda size: loss_picture(STEPS, LOSS, VALIDATION, 2.43, size),
    "timeline": lambda size: timeline_picture(all_boxes(plan(4)), size),
    "throughput": lambda size: throughput_picture(STEPS, 1000 * LOSS, size),
    "lengths": lambda size: histogram_picture(BUCKETS, MARKS, "documents", size),
    "cost": lambda size: cost_picture(COST_CURVE, size),
    "speedup": lambda size: speedup_picture(SWEPT, size),
    "seconds": lambda size: seconds_picture(SWEPT, size),
    "memory": lambda size: memory_picture(ESTIMATE, size),
}


@cache
def drawn(name: str, size: Size) -> str:
    """A picture, drawn once: that takes most of a test."""
    return PICTURES[name](size)


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


class Place(NamedTuple):
    """A text and the pixels that it covers, with letters 0.55 times as wide as the font size."""

    text: str
    left: float
    top: float
    right: float
    bottom: float


def places(svg: str) -> list[Place]:
    found = []
    for element in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"):
        text, style = element.text or "", element.attrib["style"]
        font = float(re.findall(r"([0-9.]+)px", style)[0])
        turn, x, y = map(float, re.findall(r"rotate\((\S+) (\S+) (\S+)\)", element.attrib["transform"])[0])
        wide = 0.55 * font * len(text)
        anchor = re.findall(r"text-anchor: (\w+)", style)[0]
        before = {"start": 0.0, "middle": wide / 2, "end": wide}[anchor]
        if turn == -90.0:
            found.append(Place(text, x - 0.75 * font, y - wide + before, x + 0.1 * font, y + before))
        else:
            found.append(Place(text, x - before, y - 0.75 * font, x - before + wide, y + 0.1 * font))
    return found
