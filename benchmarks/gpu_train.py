"""Training on one GPU: tokens per second and MFU of micro-batches of a 1B and an 8B-shaped model through ZeRO.

`python benchmarks/gpu_train.py [--json FILE]` runs micro-batches of one sequence in bf16, forward and backward, as the
trainer does, and takes medians after a warm-up. The 8B-shaped model has fewer layers, so that its states fit on one
GPU. MFU is the rate of model FLOPs, without recompute (`engine/cost/flops.py`), divided by the data sheet's peak. The
exit code is 1 if a case fails, and 3 without a CUDA device.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np

from benchmarks import on_gpu
from benchmarks.on_gpu import Row
from benchmarks.one_rank import OneRank, joined
from engine.config.load import load
from engine.config.schema import Config
from engine.cost.datasheets import sheet_peak
from engine.cost.model import Costs
from engine.hardware.timing import Stopwatch
from engine.parallel.groups import Groups

CASES = (
    ("1b", 8192, "none", ()),
    ("1b", 32768, "layer_keep_attention", ()),
    ("1b", 65536, "layer_keep_attention", ()),
    ("llama3-8b", 8192, "none", ("model.layers=8",)),
    ("llama3-8b", 32768, "layer_keep_attention", ("model.layers=8",)),
    ("llama3-8b", 65536, "layer_keep_attention", ("model.layers=8",)),
)
NAMES = ("model", "tokens", "recompute")  # columns of a case
CLUSTER, VOCAB = "h200x8", 32768
REPEATS, WARM_UPS = 8, 3
SHOWN = "| {model} | {tokens} | {recompute} | {tokens_per_s:,.0f} | {mfu:.3f} | {peak_gib:.1f} |"


def main() -> None:
    """Print the table. Each case runs in a new process, so that its peak memory does not include other cases."""
    path = on_gpu.parse_options(__doc__).json
    print("| model | tokens | recompute | tokens/s | MFU | peak memory, GiB |\n|---|---|---|---|---|---|")
    rows: list[Row] = []
    for case in CASES:
        rows.append(on_gpu.alone(dict(zip(NAMES, case, strict=False)), measured, case))
        if "error" not in rows[-1]:
            print(SHOWN.format(**rows[-1]), flush=True)
        on_gpu.write(path, torch.device("cuda"), rows=rows)
    on_gpu.leave(rows)


def measured(case: tuple[str, int, str, tuple[str, ...]]) -> Row:
    """Measure a case, in a new process."""
    config = config_of(*case)
    with joined(config) as groups:
        return measure(config, groups)


def config_of(model: str, tokens: int, recompute: str, more: tuple[str, ...]) -> Config:
    """Load the config of one case."""
    lengths = [f"context={tokens}", f"capacity={tokens}", f"batch_tokens={tokens}"]
    shape = [f"model={model}", f"model.vocab={VOCAB}", f"recompute={recompute}"]
    return load(["recipe=h200-1b-8k", *shape, *lengths, *more])


def measure(config: Config, groups: Groups) -> Row:
    """Measure micro-batches of one sequence of `context` tokens, forward and backward."""
    rank, watch = OneRank.of(config, groups), Stopwatch(groups.device)

    def run() -> float:
        began = watch.now()
        rank.micro_batch(config.context)
        return watch.now() - began

    run()
    rank.engine.step(1e-6)  # creates the optimizer states, which belong to the peak
    seconds = median([run() for _ in range(WARM_UPS + REPEATS)][WARM_UPS:])
    flops = Costs.of(config).flops(np.array([config.context]))
    peak = torch.cuda.max_memory_allocated() / 2**30 if groups.device.type == "cuda" else 0.0
    mfu = flops / seconds / (sheet_peak(CLUSTER) or 1.0)
    kernel = rank.context.kernel.name
    return {"tokens_per_s": config.context / seconds, "mfu": mfu, "peak_gib": peak, "kernel": kernel}


if __name__ == "__main__":
    main()
