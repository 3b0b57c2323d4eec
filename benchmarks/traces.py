"""Traces for measurements of planners: settings and random sequence lengths.

- lognormal: lengths from 128 to 8,192 (mu 7, sigma 1), capacity 2K;
- github, byted: the paper's mixes (engine/data/mixes.py), context 2M or as much as the ranks hold, capacity 8K.

The model is the paper's 7B on nodes of eight H200s, with rates from the data sheet.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.random import Generator, Philox

from engine.config.load import load
from engine.config.schema import Config
from engine.data.mixes import MIXES
from engine.job import Job
from engine.planner.settings import PlanSettings
from engine.units import Ints

TRACES = ("lognormal", "github", "byted")
_K = 1024
_NOTHING: dict[str, Any] = dict.fromkeys(("kv", "dkv", "latency", "round", "ring", "merge", "micro", "sequence"), 0.0)


def settings_of(trace: str, ranks: int, mode: str = "free") -> PlanSettings:
    """Settings of a trace on a number of ranks, with communication and offload."""
    return Job(_config(trace, ranks, mode)).settings


def compute_only(settings: PlanSettings) -> PlanSettings:
    """The same settings without offload, where only linear layers and attention take time."""
    rates = settings.costs.rates._replace(**_NOTHING)
    return replace(settings, offload=0, costs=replace(settings.costs, rates=rates, slot=0))


def draw(trace: str, ranks: int, sequences: int, seed: int) -> Ints:
    """Random sequence lengths of one step, [sequences]."""
    random = Generator(Philox(key=seed))
    if trace == "lognormal":
        return np.clip(random.lognormal(7.0, 1.0, sequences), 128, 8 * _K).astype(np.int64)
    config = _config(trace, ranks, "free")
    return np.minimum(MIXES[trace](random, config.lengths, sequences), config.context)


def _config(trace: str, ranks: int, mode: str) -> Config:
    capacity = 2 * _K if trace == "lognormal" else 8 * _K
    context = min(8 * _K if trace == "lognormal" else 2048 * _K, ranks * capacity)
    stage = 1 if mode == "free" else 3
    # All of the memory is used, so that makespans compare with those of commits before cluster.headroom.
    return load(
        [
            "recipe=llama7b-2m",
            "cluster=h200x8",
            "cluster.headroom=0",
            f"cluster.nodes={max(1, ranks // 8)}",
            f"cluster.ranks_per_node={min(ranks, 8)}",
            "parallel.tp=1",
            f"capacity={capacity}",
            f"context={context}",
            f"lengths.max={context}",
            f"planner.mode={mode}",
            f"zero.stage={stage}",
        ]
    )
