"""The longest context of the 1B recipe on one GPU, estimated with and without offload, and one full step at it.

Attention time grows with the square of the context, so a step at the longest context may take many minutes. A step that
would take more than two minutes by the data sheet runs at a shorter context instead, and the output reports that.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks.gpu.one_rank import OneRank
from engine.config.load import load
from engine.config.schema import Config
from engine.cost.model import Costs
from engine.fit.largest import longest_context
from engine.hardware.timing import Stopwatch
from engine.job import Job
from engine.parallel.groups import Groups
from engine.planner.ratios import least_offload
from engine.units import NS, PPM

HOST = "cluster.host_memory=96GiB"  # of the machine's 128 GiB; the processes need the rest
MOST_S = 120.0  # longest step to run
MODES = ("none", "layer_keep_attention", "layer")


class Longest(NamedTuple):
    """The recipe with a recompute mode and an `offload.ratio`."""

    recompute: str
    ratio: str
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join(["1b", *self.keys, f"recompute={self.recompute}", f"offload.ratio={self.ratio}"])

    def config(self, tokens: int = 8192) -> Config:
        """The config for sequences of `tokens` tokens."""
        lengths = [f"{key}={tokens}" for key in ("context", "capacity", "batch_tokens")]
        keys = [f"recompute={self.recompute}", f"offload.ratio={self.ratio}", HOST, "cluster.headroom=0"]
        return load(["recipe=h200-1b-8k", *keys, *self.keys, *lengths])


CASES = (Longest("none", "0"), Longest("none", "auto"), Longest("layer_keep_attention", "auto"))


class Length(NamedTuple):
    """The longest context that fits, the longest whose step takes at most MOST_S, and the seconds of each."""

    fits: int
    runs: int
    fits_s: float
    runs_s: float


def length_of(case: Longest) -> Length:
    settings = Job(case.config()).settings
    seconds = partial(step_seconds, settings.costs)
    fits = longest_context(settings)
    runs = bisect_right(range(1, fits + 1), MOST_S, key=seconds)
    return Length(fits, runs, seconds(fits), seconds(runs))


def step_seconds(costs: Costs, tokens: int) -> float:
    """Seconds of a step of one sequence by the data sheet, if copies overlap with compute."""
    return (int(costs.sequence(np.array([tokens]))[0]) + costs.fixed + costs.step) / NS


def outlook() -> list[str]:
    """Estimates for each recompute mode without and with offload, a line each; says which of them are not run."""
    said = []
    for case in (Longest(mode, ratio) for mode in MODES for ratio in ("0", "auto")):
        found, run = length_of(case), "" if case in CASES else ", not run"
        said.append(f"longest: {case}: {found.fits:,} tokens by the estimate, a step {found.fits_s:.0f} s{run}")
    return said


def longest(case: Longest, groups: Groups) -> dict[str, Any]:
    """Run one full step at the longest context, or at the longest that takes MOST_S; return its time and memory."""
    length = length_of(case)
    tokens, config = length.runs, case.config(length.runs)
    ratio = least_ratio(config)
    built = case._replace(ratio="auto").config(tokens)  # `OneRank` needs offload, at whatever ratio
    rank, watch = OneRank.of(built, groups).with_plans(), Stopwatch(groups.device)
    rank.warm_up(tokens, ratio)
    began = watch.now()
    peaks = rank.step(tokens, ratio)
    seconds, peak, expected = watch.now() - began, max(peaks.values()), rank.estimated(tokens, ratio)
    cut = "" if tokens == length.fits else f" (cut: {length.fits:,} tokens would take {length.fits_s:.0f} s)"
    gib = [f"{size / 2**30:.1f} GiB" for size in (peak, expected, rank.offload.arenas[0].size)]
    return {
        "said": f"a step of {tokens:,} tokens{cut} took {seconds:.1f} s with {ratio:.2f} offloaded, peak {gib[0]}, "
        f"estimate {gib[1]}, on the host {gib[2]}; the time includes compilation for this length",
        "target": f"a full step at {length.fits:,} tokens, or at as many as {MOST_S:.0f} s allow",
        "holds": not rank.offload.pop_short() and peak <= 1.05 * expected,
        "ratio": ratio,
        "seconds": seconds,
        "peak": peak,
        "estimate": expected,
        "peaks": peaks,
        "length": length._asdict(),
        "kernel": rank.context.kernel.name,
    }


def least_ratio(config: Config) -> float:
    """The smallest offload ratio at which a micro-batch of `capacity` tokens fits, from 0 to 1."""
    settings = Job(config).settings
    memory = int(settings.cluster.memory.min())
    return least_offload(config.capacity, config.capacity, memory, settings).offload / PPM
