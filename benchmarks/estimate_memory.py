"""Published long-context runs compared with the estimate: `python benchmarks/estimate_memory.py`.

Arctic Long Sequence Training (arXiv 2506.13996) on Llama 3.1 8B: ZeRO-3 in bf16, optimizer on the host, layers
recomputed from inputs that are offloaded, SwiGLU in tiles of `hidden` tokens, loss in chunks, each sequence over all
ranks. Lengths and settings are those of its recipes (github.com/snowflakedb/ArcticTraining,
projects/sequence-parallelism/run-h100-sp*-llama-8b.yml, run-h200-sp1-llama-8b-liger-offload-tiled-mlp.yml); on one GPU
the weights are on the host too. These runs split heads over ranks, where ours send K and V around a ring. Host memory
is "1.9TB" per node of eight GPUs (README of the recipes). Runs on one GPU could use the memory of the whole node; the
node of the H200 is assumed to have the same amount.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import driver
from engine.config.load import load
from engine.fit.estimate import Estimate, estimate
from engine.fit.largest import longest_context
from engine.job import Job
from engine.planner.ratios import Load

_SETTINGS = (
    "model=llama3-8b",
    "dtype=bf16",
    "memory=zero3_recompute",
    "optimizer.on_host=true",
    "offload.ratio=1",
    "mlp_tile=4096",
    "batch_tokens=16M",
)
_ONE = ("cluster.headroom=0", "cluster.ranks_per_node=1", "zero.weights_on_host=true", "cluster.host_memory=1769GiB")
_NODE = ("cluster.headroom=0", "cluster.ranks_per_node=8", "cluster.host_memory=221GiB")


@dataclass(frozen=True)
class Published:
    """A published run: its context in tokens, its ranks, and overrides that set its cluster."""

    name: str
    context: int
    ranks: int
    keys: tuple[str, ...]

    def overrides(self) -> list[str]:
        """All overrides of the run; the capacity is the part of the context on each rank."""
        return [*_SETTINGS, *self.keys, f"context={self.context}", f"capacity={-(-self.context // self.ranks)}"]


RUNS = (
    Published("1 H200", 1_200_000, 1, (*_ONE, "cluster=h200x8")),
    Published("1 H100", 500_000, 1, (*_ONE, "cluster=h100x8")),
    Published("8 H100", 3_800_000, 8, (*_NODE, "cluster=h100x8")),
    Published("32 H100", 15_500_000, 32, (*_NODE, "cluster=h100x8", "cluster.nodes=4")),
)


def predicted(run: Published) -> tuple[Estimate, int]:
    """The estimate at the published context, and the longest context that fits on the same devices by the estimate."""
    config = load(run.overrides())
    settings = Job(config).settings
    full = Load(config.capacity, config.capacity, settings.offload)
    return estimate(Job(config), full), longest_context(settings)


def row(run: Published) -> Iterator[driver.Row]:
    """Yield the row of a run; sizes in GiB."""
    found, longest = predicted(run)
    peak, device, host = (round(size / 2**30, 1) for size in (found.peak, found.device_total, found.host))
    yield {
        "run": run.name,
        "published_context": run.context,
        "peak_gib": peak,
        "device_gib": device,
        "host_per_rank_gib": host,
        "fits": found.fits,
        "longest_context": longest,
        "longest_over_published": longest / run.context,
    }


def cases(arguments: argparse.Namespace) -> Iterator[driver.Case]:
    for run in RUNS:
        yield run.name, partial(row, run)


if __name__ == "__main__":
    sys.exit(driver.main(__doc__, cases))
