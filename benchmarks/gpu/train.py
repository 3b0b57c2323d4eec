"""Training on one GPU: tokens per second and MFU of a 1B and an 8B-shaped model through ZeRO.

`python benchmarks/gpu/train.py [--json FILE] [--only SECTION]` runs in bf16, as the trainer does:

    cases  micro-batches of one sequence, forward and backward; medians after a warm-up. The 8B-shaped model has fewer
           layers, so that its states fit on one GPU. cuDNN serves all calls; a second row has the rate of PyTorch's
           varlen kernel, which training uses for shapes that come too seldom for a plan of cuDNN
    missing  those of `cases` that no GPU has run yet
    added, apart  those of `cases` with 8K tokens and one with 1K, where gradients of weights are added to fp32 in their
           product, as in training, or apart from it. With 1K tokens the time of the host may decide (`ADDED` in
           `engine/models/common/product.py`)
    fp8    those of `cases` with 8K tokens, with linear layers in FP8
    plan   steps of lengths like GitHub's (`plans.py`), each run twice: `new_s` is the time of the first run, in which
           most shapes are new, `seen_s` that of the second. The first row has the kernel that training selects. There
           are others for flash-attn 3 and 4 and for cuDNN with the varlen kernel, where they work, on the same steps
    trace  a profile of one micro-batch: kernel launches, the fraction of the time in which a kernel runs, and the
           kernels that take longest, all of them summed by class; attention as in `cases`

MFU is the rate of model FLOPs, without recompute (`engine/cost/flops.py`), divided by the data sheet's peak. The exit
code is 1 if a case fails, and 3 without a CUDA device.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from benchmarks.gpu import on_gpu, plans
from benchmarks.gpu.on_gpu import Row
from benchmarks.gpu.one_rank import OneRank, joined
from benchmarks.gpu.overlap import device_spans, events_of, merged
from engine.attention.kernels.choice import choose
from engine.config.load import load
from engine.config.schema import Config
from engine.cost.datasheets import sheet_peak
from engine.dtypes import DTYPES
from engine.hardware.timing import Stopwatch
from engine.job import Job
from engine.models.common import product
from engine.parallel.groups import Groups
from engine.planner.plan.step_plan import MicroBatch
from engine.trainer.model import kernel_of

Case = tuple[str, int, str, tuple[str, ...]]  # model, tokens, recompute, further keys
NAMES = ("model", "tokens", "recompute")  # columns of a case
_8B = ("model.layers=8",)
MISSING: tuple[Case, ...] = (
    ("llama3-8b", 65536, "layer_keep_attention", _8B),
    ("1b", 65536, "none", ()),
    ("llama3-8b", 32768, "layer_keep_attention", _8B),
    ("1b", 32768, "layer_keep_attention", ()),
)
CASES: tuple[Case, ...] = (
    ("1b", 8192, "none", ()),
    ("1b", 65536, "layer_keep_attention", ()),
    ("llama3-8b", 8192, "none", _8B),
    *MISSING,
)
PLANS: tuple[Case, ...] = (("1b", 65536, "layer_keep_attention", ()),)
TRACES: tuple[Case, ...] = (
    ("1b", 8192, "none", ()),
    ("llama3-8b", 8192, "none", _8B),
    ("1b", 65536, "layer_keep_attention", ()),
)
SHORT = tuple(case for case in CASES if case[1] == 8192)
FEW: Case = ("1b", 1024, "none", ())
TINY: tuple[Case, ...] = (("tiny", 64, "none", ()),)
ON_REQUEST = ("missing", "added", "apart", "fp8")  # sections that run only alone
CLUSTER, VOCAB = "h200x8", 32768
WARM_UPS = 3  # before a trace
REPEATS, MOST_S = 8, 8.0  # of a case: fewer repeats if they take longer
STEPS, STEP_TOKENS = 5, 4  # planned steps, and their tokens as a multiple of the context
STEPS_S = 60.0  # after which no further step begins
PACKING = ("flash_attn_3", "flash_attn_4", "cudnn")  # kernels that are compared on planned steps
TOP = 40  # kernels that a trace lists
# Classes of kernels by parts of their names, the first that matches; all others are `pointwise`.
CLASSES = {
    "attention": ("flash", "fmha", "sdpa", "attention"),
    "product": ("gemm", "cutlass", "cublas", "nvjet", "wgmma", "xmma"),
    "copy": ("copy", "memcpy", "memset", "fill"),
}


def main() -> None:
    """Print a line per case. Each case runs in a new process, so that its peak memory does not include other cases."""
    options = on_gpu.parse_options(__doc__, tuple(SECTIONS))
    device = on_gpu.device_of(options)
    rows: list[Row] = []
    for section in [options.only] if options.only else [name for name in SECTIONS if name not in ON_REQUEST]:
        measure, cases, shown = SECTIONS[section]
        for case in TINY if options.dry_run else cases:
            named = {"section": section} | dict(zip(NAMES, case, strict=False))
            first = on_gpu.alone(named, measured, measure, case)
            for row in (first, *(named | other for other in first.pop("others", ()))):
                rows.append(row)
                if "error" not in row:
                    print(shown.format(**row), flush=True)
            on_gpu.write(options.json, device, rows=rows)
    on_gpu.leave(rows)


def measured(measure: Callable[[Config, Groups], Row], case: Case) -> Row:
    """Measure a case, in a new process. Without a GPU the world is one of CPU ranks."""
    config = config_of(*case)
    with joined(config if torch.cuda.is_available() else load([])) as groups:
        return measure(config, groups)


def config_of(model: str, tokens: int, recompute: str, more: tuple[str, ...]) -> Config:
    """Load the config of one case."""
    lengths = [f"context={tokens}", f"capacity={tokens}", f"batch_tokens={tokens}"]
    shape = [f"model={model}", f"model.vocab={VOCAB}", f"recompute={recompute}"]
    return load(["recipe=h200-1b-8k", *shape, *lengths, *more])


def measure(config: Config, groups: Groups) -> Row:
    """Measure micro-batches of one sequence of `context` tokens, forward and backward.

    If training selects cuDNN, `others` has one more row: the same with the varlen kernel.
    """
    rank = OneRank.of(config, groups).with_plans()
    rank.micro_batch(config.context)
    rank.engine.step(1e-6)  # creates the optimizer states, which belong to the peak
    found = speed(rank)
    if found["kernel"] == "cudnn":
        found["others"] = [speed_of_varlen(rank)]
    return found


def measure_apart(config: Config, groups: Groups) -> Row:
    """Measure the same as `measure`, if products do not add the gradients of weights."""
    with patch.object(product, "adds", lambda device: False):
        return measure(config, groups)


def speed(rank: OneRank) -> Row:
    """Measure a rank's micro-batches of one sequence of `context` tokens, forward and backward, after a warm-up."""
    config, watch = rank.config, Stopwatch(rank.context.device)

    def run() -> float:
        began = watch.now()
        rank.micro_batch(config.context)
        return watch.now() - began

    on_gpu.new_peak(rank.context.device)
    run()
    seconds = median(on_gpu.repeated(run, REPEATS, MOST_S))
    mfu = Job(config).costs.flops(np.array([config.context])) / seconds / (sheet_peak(CLUSTER) or 1.0)
    rate, peak = config.context / seconds, on_gpu.new_peak(rank.context.device) / 2**30
    return {"tokens_per_s": rate, "mfu": mfu, "peak_gib": peak, "kernel": rank.context.kernel.name}


def speed_of_varlen(rank: OneRank) -> Row:
    """Measure the same with PyTorch's varlen kernel. A failure is printed and recorded in the row."""
    config, name = rank.config, "torch_varlen"
    try:
        kernel = choose(rank.context.device, DTYPES[config.dtype], config.model.head_dim, prefer=name)
        return speed(rank.with_kernel(kernel))
    except Exception as error:
        return on_gpu.failed({"kernel": name}, error)


def planned(config: Config, groups: Groups) -> Row:
    """Measure steps of real plans for one rank, each run twice with each kernel; `others` has those not selected."""
    began = time.monotonic()
    drawn, steps = steps_of(config)
    rank, watch = OneRank.of(drawn, groups), Stopwatch(groups.device)
    ranks, failures = {rank.context.kernel.name: rank}, list[Row]()
    for name in PACKING if groups.device.type == "cuda" else ("reference",):
        if name not in ranks:
            try:
                ranks[name] = rank.with_kernel(kernel_of(drawn, groups.device, ranks=1, prefer=name))
            except ValueError as error:
                print(f"- {error}", flush=True)
                if "not installed" not in str(error):
                    failures.append(on_gpu.failed({"kernel": name}, error))
    # Compiles what does not depend on the lengths; the largest of the micro-batches allocates.
    largest = max((micro for step in steps for micro in step), key=plans.tokens_of)
    for one in ranks.values():
        one.planned(largest)
    rank.engine.step(1e-6)

    def run(one: OneRank, step: list[MicroBatch]) -> float:
        began = watch.now()
        for micro in step:
            one.planned(micro)
        one.engine.step(1e-6)
        return watch.now() - began

    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in ranks}
    done = list[list[MicroBatch]]()
    for step in steps:
        if done and time.monotonic() > began + STEPS_S:
            break
        for name, one in ranks.items():
            spent[name].append((run(one, step), run(one, step)))
        done.append(step)
    lengths = [np.array([shard.length for micro in step for shard in micro.shards]) for step in done]
    flops = sum(float(Job(drawn).costs.flops(of_step)) for of_step in lengths)
    tokens = sum(int(of_step.sum()) for of_step in lengths)
    rows: list[Row] = []
    for name, times in spent.items():
        new, seen = zip(*times, strict=True)
        rates = {"tokens_per_s": tokens / sum(seen), "tokens_per_s_new": tokens / sum(new)}
        mfu = flops / sum(seen) / (sheet_peak(CLUSTER) or 1.0)
        sequences = [len(of_step) for of_step in lengths]
        rows.append(
            rates | {"mfu": mfu, "new_s": list(new), "seen_s": list(seen), "sequences": sequences, "kernel": name}
        )
    return rows[0] | {"others": rows[1:] + failures}


def steps_of(config: Config, write: bool = False) -> tuple[Config, list[list[MicroBatch]]]:
    """The config with GitHub's lengths for the model of a case, and the micro-batches of its first steps."""
    shape = [f"model={config.model.name}", f"model.vocab={VOCAB}", f"recompute={config.recompute}"]
    drawn = plans.config_of(1, config.capacity, config.context, STEP_TOKENS * config.context, *shape)
    return drawn, plans.planned(drawn, STEPS, write=write)


def traced(config: Config, groups: Groups) -> Row:
    """Profile one micro-batch of one sequence, after a warm-up."""
    rank, watch = OneRank.of(config, groups).with_plans(), Stopwatch(groups.device)
    for _ in range(WARM_UPS):
        rank.micro_batch(config.context)
    watch.now()
    with torch.profiler.profile() as profile:
        began = watch.now()
        rank.micro_batch(config.context)
        seconds = watch.now() - began
    return summary(events_of(profile), seconds) | {"kernel": rank.context.kernel.name}


def summary(events: list[dict[str, Any]], seconds: float) -> Row:
    """Summarise the kernels among a trace's events, whose times are in microseconds."""
    _, kernels = device_spans(events)
    busy = sum(stop - start for start, stop in merged(kernels)) / 1e6
    spent: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "kernel":
            spent[event["name"]].append(event["dur"] / 1e3)
    classes = dict.fromkeys([*CLASSES, "pointwise"], 0.0)
    for name, times in spent.items():
        classes[class_of(name)] += sum(times)
    longest = sorted(spent.items(), key=lambda item: -sum(item[1]))[:TOP]
    return {
        "seconds": seconds,
        "launches": len(kernels),
        "busy": busy / seconds,
        "ms": classes | {"none": 1e3 * (seconds - busy)},
        "top": [{"kernel": name[:100], "ms": sum(times), "count": len(times)} for name, times in longest],
    }


def class_of(kernel: str) -> str:
    """The class of a kernel by its name."""
    found = (name for name, parts in CLASSES.items() if any(part in kernel.lower() for part in parts))
    return next(found, "pointwise")


_CASE = "| {model} | {tokens} | {recompute} |"
_SPEED = f"{_CASE} {{kernel}} | {{tokens_per_s:,.0f}} tokens/s | MFU {{mfu:.3f}} | {{peak_gib:.1f}} GiB |"
SECTIONS: dict[str, tuple[Callable[[Config, Groups], Row], tuple[Case, ...], str]] = {
    "cases": (measure, CASES, _SPEED),
    "missing": (measure, MISSING, _SPEED),
    "added": (measure, (FEW, *SHORT), _SPEED),
    "apart": (measure_apart, (FEW, *SHORT), _SPEED),
    "fp8": (measure, tuple((*case[:3], (*case[3], "linear_dtype=fp8")) for case in SHORT), _SPEED),
    "plan": (
        planned,
        PLANS,
        f"{_CASE} {{kernel}} | {{tokens_per_s:,.0f}} tokens/s, new {{tokens_per_s_new:,.0f}} | MFU {{mfu:.3f}} |",
    ),
    "trace": (traced, TRACES, f"{_CASE} {{launches}} launches | busy {{busy:.3f}} | ms {{ms}} |"),
}


if __name__ == "__main__":
    main()
