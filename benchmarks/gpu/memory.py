"""Memory on one GPU: measured and estimated peak, cost of offload, overlap of its copies, and the longest context.

`python benchmarks/gpu/memory.py [--json FILE] [--only peak|time|trace|longest]` should take about 11 minutes on an
H200:

    peak     peak bytes of tensors in a whole step, and the part of the step they occur in, against the estimate
             without allowances
    time     median time of a micro-batch without and with offload, run alternately, and the bytes that its forward
             pass leaves on the device
    trace    fraction of the time of a micro-batch's offload copies in which kernels run on another stream
    longest  longest context of the 1B recipe by the estimate, without and with offload, and one whole step at it

A step that would take longer than two minutes by the data sheet runs at a shorter context instead, and the output says
so. Model, optimizer and offload are constructed as in the trainer, but if the attention kernel is cuDNN, it serves a
shape from the first call on: otherwise the kernel would change in the middle of a measurement. Each output line shows
its target and whether it was met; each case runs in a new process. Exit codes: 1 if a case fails, 4 if one only misses
its target, 3 without a CUDA device.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu import longest, on_gpu
from benchmarks.gpu.on_gpu import Row
from benchmarks.gpu.one_rank import OneRank, joined
from benchmarks.gpu.overlap import device_spans, events_of, hidden_fraction
from benchmarks.gpu.train import config_of
from engine.config.load import load
from engine.config.schema import Config
from engine.hardware.timing import Stopwatch
from engine.parallel.groups import Groups

GIB = 2**30
ERROR, SAVED, HIDDEN = 0.05, 0.5, 0.9  # targets


class Step(NamedTuple):
    """A step of one sequence, with the fraction `ratio` of the saved activations offloaded."""

    model: str
    tokens: int
    recompute: str
    ratio: float = 0.0
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join(
            [self.model, *self.keys, f"tokens={self.tokens}", f"recompute={self.recompute}", f"offload={self.ratio:g}"]
        )

    @property
    def config(self) -> Config:
        return config_of(self.model, self.tokens, self.recompute, (longest.HOST, *self.keys))


class Race(NamedTuple):
    """A step to run with and without offload alternately, and the target: the largest relative slowdown."""

    step: Step
    rounds: int
    most: float

    def __str__(self) -> str:
        return str(self.step)


_1B, _8B = ("model.layers=8",), ("model.layers=4",)  # fewer layers, to initialise their weights in less time
PEAKS = (
    Step("1b", 32768, "none", 0.0, _1B),
    Step("1b", 65536, "none", 1.0, _1B),
    Step("1b", 65536, "layer_keep_attention", 1.0, _1B),
    Step("1b", 65536, "none", 0.0, (*_1B, "mlp_tile=4K")),
    Step("1b", 32768, "none", 0.5, (*_1B, "zero.stage=3")),
    Step("llama3-8b", 32768, "none", 0.0, _8B),
    Step("llama3-8b", 65536, "layer_keep_attention", 0.5, _8B),
    Step("llama3-8b", 32768, "layer", 0.0, (*_8B, "zero.stage=3")),
    Step("mixtral8x7b", 32768, "none", 0.0, (*_8B, "model.ffn=3584")),
    Step("llama3-8b", 32768, "none", 0.0, (*_8B, "optimizer.on_host=true")),
)
RACES = (
    Race(Step("1b", 65536, "none", 0.5), rounds=4, most=0.01),
    Race(Step("1b", 262144, "layer_keep_attention", 1.0, ("model.layers=6",)), rounds=2, most=0.02),
)
TRACES = (Step("1b", 65536, "none", 0.5, _1B),)


def main() -> None:
    """Print a line per case, and write all results after each case, in case the next one fails."""
    asked = on_gpu.parse_options(__doc__, tuple(SECTIONS))
    device, rows = on_gpu.device_of(asked), list[Row]()
    for section in [asked.only] if asked.only else SECTIONS:
        if section == "longest" and not asked.dry_run:
            print("\n".join(longest.outlook()), flush=True)
        for case in [TINY[section]] if asked.dry_run else SECTIONS[section][1]:
            rows.append(on_gpu.alone({"section": section, "case": str(case)}, measured, section, case))
            if "error" not in rows[-1]:
                print(line(rows[-1]), flush=True)
            on_gpu.write(asked.json, device, rows=rows)
    on_gpu.leave(rows, asked.dry_run)


def measured(section: str, case: Any) -> Row:
    """Run a case of a section and return its results. Called in a new process for each case."""
    # The tests run tiny cases on a CPU.
    with joined(load(["cluster=h200x8"] if torch.cuda.is_available() else [])) as groups:
        return SECTIONS[section][0](case, groups)


def line(found: Row) -> str:
    """Format the results of a case as one line."""
    verdict = "met" if found["holds"] else "MISSED"
    return f"{found['section']}: {found['case']}: {found['said']} | target: {found['target']}: {verdict}"


def peak(step: Step, groups: Groups) -> Row:
    """Compare the peak bytes of tensors in a step with the estimate."""
    rank = OneRank.of(step.config, groups).with_plans()
    rank.warm_up(step.tokens, step.ratio)
    rank.step(step.tokens, step.ratio)  # kernels that are tuned at a new length may need more memory
    peaks = rank.step(step.tokens, step.ratio)
    part, found = max(peaks.items(), key=lambda one: one[1])
    expected = rank.estimated(step.tokens, step.ratio)
    error = found / expected - 1
    return {
        "said": f"{found / GIB:.2f} GiB, estimate {expected / GIB:.2f}, {100 * error:+.1f} %, peak in the {part}",
        "target": f"within {100 * ERROR:.0f} %",
        "holds": abs(error) <= ERROR,
        "peak": found,
        "estimate": expected,
        "peaks": peaks,
        "kernel": rank.context.kernel.name,
    }


def time(race: Race, groups: Groups) -> Row:
    """Measure the time that offload adds, and the fraction of the memory after the forward pass that it frees."""
    step, device = race.step, groups.device
    rank, watch = OneRank.of(step.config, groups).with_plans(), Stopwatch(device)
    rank.warm_up(step.tokens, step.ratio)
    rank.micro_batch(step.tokens)  # so that the allocator has reserved its blocks
    seconds: dict[float, list[float]] = {0.0: [], step.ratio: []}
    kept: dict[float, int] = {}
    for _ in range(race.rounds):
        for ratio, taken in seconds.items():
            before, began = on_gpu.allocated(device), watch.now()
            kept[ratio] = rank.micro_batch(step.tokens, ratio, partial(on_gpu.allocated, device))[0] - before
            taken.append(watch.now() - began)
    plain, offloaded = map(median, seconds.values())
    cost, freed = offloaded / plain - 1, 1 - kept[step.ratio] / (kept[0.0] or math.inf)
    moved = rank.offload.moved_bytes / rank.offload.saved_bytes
    least = SAVED if step.ratio == 1 else 0.0
    return {
        "said": f"{offloaded:.3f} s with offload, {plain:.3f} s without, {100 * cost:+.2f} %; {100 * moved:.0f} % of "
        f"saved activations offloaded, {100 * freed:.0f} % of the memory after the forward pass freed",
        "target": f"at most {100 * race.most:.0f} % more time" + (f", {100 * least:.0f} % freed" if least else ""),
        "holds": cost <= race.most and freed >= least,
        "seconds": {str(ratio): taken for ratio, taken in seconds.items()},
        "kept": {str(ratio): size for ratio, size in kept.items()},
        "moved": moved,
        "kernel": rank.context.kernel.name,
    }


def trace(step: Step, groups: Groups) -> Row:
    """Measure the fraction of the copies' time that overlaps with kernels."""
    rank, watch = OneRank.of(step.config, groups).with_plans(), Stopwatch(groups.device)
    rank.warm_up(step.tokens, step.ratio)
    rank.micro_batch(step.tokens, step.ratio)
    watch.now()
    with torch.profiler.profile() as profile:
        rank.micro_batch(step.tokens, step.ratio)
        watch.now()
    copies, kernels = device_spans(events_of(profile))
    share, took = hidden_fraction(copies, kernels), sum(copy.stop - copy.start for copy in copies) / 1e6
    return {
        "said": f"{100 * share:.1f} % of the {took:.3f} s of {len(copies)} copies overlap kernels of other streams",
        "target": f"at least {100 * HIDDEN:.0f} %",
        "holds": share >= HIDDEN,
        "share": share,
        "kernel": rank.context.kernel.name,
        "copies_s": took,
        "streams": sorted({span.stream for span in copies}),
    }


# The cases of a dry run. The last one's device has memory for a few hundred tokens beside the CUDA context.
_SHALLOW = ("model.layers=6",)
TINY: dict[str, Any] = {
    "peak": Step("tiny", 64, "none", 0.5, _SHALLOW),
    "time": Race(Step("tiny", 96, "layer_keep_attention", 1.0, _SHALLOW), rounds=2, most=0.02),
    "trace": Step("tiny", 96, "none", 1.0, _SHALLOW),
    "longest": longest.Longest("none", "auto", ("model=tiny", *_SHALLOW, "cluster.device_memory=1031MiB")),
}

SECTIONS: dict[str, tuple[Callable[[Any, Groups], Row], tuple[Any, ...]]] = {
    "peak": (peak, PEAKS),
    "time": (time, RACES),
    "trace": (trace, TRACES),
    "longest": (longest.longest, longest.CASES),
}


if __name__ == "__main__":
    main()
