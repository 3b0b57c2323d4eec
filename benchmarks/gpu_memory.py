"""Memory on one GPU: the estimate beside what is held, what offload costs, how its copies hide, the longest context.

`python benchmarks/gpu_memory.py [--json FILE] [--only peak|time|trace|longest]`, about 11 minutes in all on an H200:

    peak     a whole step; the most that tensors hold beside the estimate, without context and gaps, and when it is held
    time     a micro-batch without and with offload, in turns; medians; what of the forward pass stays on the device
    trace    of a micro-batch with offload: the share of its copies' time in which kernels run on another stream
    longest  the longest context of the 1B recipe by the estimate, without and with offload, and one whole step at it

Steps that would take longer than two minutes by the data sheet are run at the longest context that takes no longer, and
the line says so. Model, optimizer and offload are made as the trainer makes them. Each line names its target and
whether it holds; each case has a process of its own. The program leaves with 1 where one fails or misses its target,
and with 3 without a CUDA device.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import longest, on_gpu
from benchmarks.gpu_train import config_of
from benchmarks.on_gpu import Row
from benchmarks.one_rank import OneRank, joined
from benchmarks.overlap import device_spans, hidden_share
from engine.config.schema import Config
from engine.hardware.timing import Stopwatch
from engine.trainer.groups import Groups

GIB = 2**30
ERROR, SAVED, HIDDEN = 0.05, 0.5, 0.9  # targets


class Step(NamedTuple):
    """A sequence of a model, and the share of what its layers save that waits on the host."""

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
        """Return the config."""
        return config_of(self.model, self.tokens, self.recompute, (longest.HOST, *self.keys))


class Race(NamedTuple):
    """A step with offload against the same without: rounds in turns, and the time that it may cost."""

    step: Step
    rounds: int
    most: float

    def __str__(self) -> str:
        return str(self.step)


_1B, _8B = ("model.layers=8",), ("model.layers=4",)  # fewer, which draws their weights in less time
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
    """Print the lines, and write them after each, whatever becomes of the next."""
    asked = on_gpu.asked(__doc__, tuple(SECTIONS))
    rows: list[Row] = []
    for section in [asked.only] if asked.only else SECTIONS:
        if section == "longest":
            print("\n".join(longest.outlook()), flush=True)
        for case in SECTIONS[section][1]:
            rows.append(on_gpu.alone({"section": section, "case": str(case)}, measured, section, case))
            if "error" not in rows[-1]:
                print(line(rows[-1]), flush=True)
            on_gpu.write(asked.json, torch.device("cuda"), rows=rows)
    on_gpu.leave(rows)


def measured(section: str, case: Any) -> Row:
    """Return the figures of a case, in a process that has done nothing else."""
    with joined() as groups:
        return SECTIONS[section][0](case, groups)


def line(found: Row) -> str:
    """Return a row with figures as people read it."""
    verdict = "holds" if found["holds"] else "MISSED"
    return f"{found['section']}: {found['case']}: {found['said']} | target: {found['target']}: {verdict}"


def peak(step: Step, groups: Groups) -> Row:
    """Return the most that a step's tensors hold, beside the estimate."""
    rank = OneRank.of(step.config, groups)
    rank.warm_up(step.tokens, step.ratio)
    rank.step(step.tokens, step.ratio)  # kernels that are tried out at their first length may take more
    moments = rank.step(step.tokens, step.ratio)
    fullest, found = max(moments.items(), key=lambda moment: moment[1])
    expected = rank.estimated(step.tokens, step.ratio)
    error = found / expected - 1
    return {
        "said": f"{found / GIB:.2f} GiB, estimate {expected / GIB:.2f}, {100 * error:+.1f} %, most at the {fullest}",
        "target": f"within {100 * ERROR:.0f} %",
        "holds": abs(error) <= ERROR,
        "peak": found,
        "estimate": expected,
        "moments": moments,
        "kernel": rank.context.kernel.name,
    }


def time(race: Race, groups: Groups) -> Row:
    """Return what offload costs, and what of the memory that a forward pass takes it frees."""
    step, device = race.step, groups.device
    rank, watch = OneRank.of(step.config, groups), Stopwatch(device)
    rank.warm_up(step.tokens, step.ratio)
    rank.micro_batch(step.tokens)  # now the allocator has its blocks
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
        "said": f"{offloaded:.3f} s after {plain:.3f}, {100 * cost:+.2f} %; {100 * moved:.0f} % of what layers save "
        f"moved, {100 * freed:.0f} % of what the forward pass leaves freed",
        "target": f"at most {100 * race.most:.0f} % more time" + (f", {100 * least:.0f} % freed" if least else ""),
        "holds": cost <= race.most and freed >= least,
        "seconds": {str(ratio): taken for ratio, taken in seconds.items()},
        "kept": {str(ratio): size for ratio, size in kept.items()},
        "moved": moved,
        "kernel": rank.context.kernel.name,
    }


def trace(step: Step, groups: Groups) -> Row:
    """Return how much of the copies of a micro-batch hides."""
    rank, watch = OneRank.of(step.config, groups), Stopwatch(groups.device)
    rank.warm_up(step.tokens, step.ratio)
    rank.micro_batch(step.tokens, step.ratio)
    watch.now()
    with torch.profiler.profile() as profile:
        rank.micro_batch(step.tokens, step.ratio)
        watch.now()
    copies, kernels = device_spans(events_of(profile))
    share, took = hidden_share(copies, kernels), sum(copy.stop - copy.start for copy in copies) / 1e6
    return {
        "said": f"{100 * share:.1f} % of {took:.3f} s of {len(copies)} copies run under kernels of another stream",
        "target": f"at least {100 * HIDDEN:.0f} %",
        "holds": share >= HIDDEN,
        "share": share,
        "copies_s": took,
        "streams": sorted({span.stream for span in copies}),
    }


def events_of(profile: torch.profiler.profile) -> list[dict[str, Any]]:
    """Return the events of a trace."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return found


SECTIONS: dict[str, tuple[Callable[[Any, Groups], Row], tuple[Any, ...]]] = {
    "peak": (peak, PEAKS),
    "time": (time, RACES),
    "trace": (trace, TRACES),
    "longest": (longest.longest, longest.CASES),
}


if __name__ == "__main__":
    main()
