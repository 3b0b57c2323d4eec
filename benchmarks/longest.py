"""The longest context of the 1B recipe on one GPU by the estimate, without and with offload, and one whole step at it.

Attention grows with the square of the context, so steps at the longest may take many minutes: those that would take
more than two by the data sheet run at the longest context that takes no longer, and what is printed says so.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks.one_rank import OneRank
from engine.config.load import load
from engine.config.schema import Config
from engine.cost.model import NS, PPM, Costs
from engine.hardware.timing import Stopwatch
from engine.planner.fit import longest_context
from engine.planner.memory import least_offload
from engine.planner.settings import PlanSettings
from engine.trainer.groups import Groups

HOST = "cluster.host_memory=96GiB"  # of a host of 128 GiB: its processes take some too
MOST_S = 120.0  # of a step
MODES = ("none", "layer_keep_attention", "layer")


class Longest(NamedTuple):
    """The recipe by its recompute mode and `offload.ratio`."""

    recompute: str
    ratio: str
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join(["1b", *self.keys, f"recompute={self.recompute}", f"offload.ratio={self.ratio}"])

    def config(self, tokens: int = 8192) -> Config:
        """Return the config for sequences of so many tokens."""
        lengths = [f"{key}={tokens}" for key in ("context", "capacity", "batch_tokens")]
        keys = [f"recompute={self.recompute}", f"offload.ratio={self.ratio}", HOST]
        return load(["recipe=h200-1b-8k", *keys, *self.keys, *lengths])


CASES = (Longest("none", "0"), Longest("none", "auto"), Longest("layer_keep_attention", "auto"))


class Length(NamedTuple):
    """The longest context that fits, the longest whose step does not take too long, and the seconds of each."""

    fits: int
    runs: int
    fits_s: float
    runs_s: float


def length_of(case: Longest) -> Length:
    """Return how long the context of a case may be."""
    settings = PlanSettings.of(case.config())
    seconds = partial(step_seconds, settings.costs)
    fits = longest_context(settings)
    runs = bisect_right(range(1, fits + 1), MOST_S, key=seconds)
    return Length(fits, runs, seconds(fits), seconds(runs))


def step_seconds(costs: Costs, tokens: int) -> float:
    """Return what a step of one sequence takes by the data sheet, if copies hide."""
    return (int(costs.sequence(np.array([tokens]))[0]) + costs.fixed + costs.step) / NS


def outlook() -> list[str]:
    """Return what the estimate says of each recompute mode, run or not."""
    said = []
    for case in (Longest(mode, ratio) for mode in MODES for ratio in ("0", "auto")):
        found, run = length_of(case), "" if case in CASES else ", not run"
        said.append(f"longest: {case}: {found.fits:,} tokens by the estimate, a step {found.fits_s:.0f} s{run}")
    return said


def longest(case: Longest, groups: Groups) -> dict[str, Any]:
    """Return what a whole step at the longest context took and held."""
    length = length_of(case)
    tokens, config = length.runs, case.config(length.runs)
    ratio = least_ratio(config)
    rank, watch = OneRank.of(config, groups), Stopwatch(groups.device)
    rank.warm_up(tokens, ratio)
    began = watch.now()
    moments = rank.step(tokens, ratio)
    seconds, peak, expected = watch.now() - began, max(moments.values()), rank.estimated(tokens, ratio)
    cut = "" if tokens == length.fits else f" (cut: one of {length.fits:,} would take {length.fits_s:.0f} s)"
    gib = [f"{size / 2**30:.1f} GiB" for size in (peak, expected, rank.offload.arena.size)]
    return {
        "said": f"a step of {tokens:,} tokens{cut} took {seconds:.1f} s with {ratio:.2f} offloaded, peak {gib[0]}, "
        f"estimate {gib[1]}, on the host {gib[2]}; the first step of this length, so with what is compiled for it",
        "target": f"a whole step at {length.fits:,} tokens, or at as many as {MOST_S:.0f} s allow",
        "holds": not rank.offload.arena.short and peak <= 1.05 * expected,
        "ratio": ratio,
        "seconds": seconds,
        "peak": peak,
        "estimate": expected,
        "moments": moments,
        "length": length._asdict(),
    }


def least_ratio(config: Config) -> float:
    """Return the least share of a full micro-batch that has to wait on the host."""
    settings = PlanSettings.of(config)
    memory = int(settings.cluster.memory.min())
    return least_offload(config.capacity, config.capacity, memory, settings).offload / PPM
