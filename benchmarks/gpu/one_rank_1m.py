"""One rank's part of a step of 1M tokens on eight GPUs, timed on one GPU, and the step that follows from it.

`python benchmarks/gpu/one_rank_1m.py [--json FILE] [--dry-run]` runs micro-batches of `recipe=qwen3-8b-1m-1node`: the
131,072 queries of one rank attend to the 1,048,576 keys of a ring of eight, forward and backward, in models of the
recipe's widths with 1 and 3 layers. Messages of the ring are copies on the device. The difference of the two depths is
the time of two layers, the rest that of the embedding, head and loss. The deeper model also runs with as much offloaded
as possible.

The step has all layers of the recipe, and what one GPU cannot show as the cost model has it: ZeRO's gathers and
reductions, and the update. It assumes that the ring's transfers hide behind attention. Steps of 2M and 4M tokens on two
and four nodes are those of the cost model, multiplied by what this step takes over the modelled one. The output has
them beside TRL's (docs/recipes.md). Exit codes: 1 if a case fails, 3 without a CUDA device, 4 if the step takes longer
than MOST_S.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, cast

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu import on_gpu
from benchmarks.gpu.attention import DEGREE, PART, Replay
from benchmarks.gpu.on_gpu import Row
from benchmarks.gpu.one_rank import OneRank, joined
from benchmarks.gpu.prepared import prepared
from engine.attention.comm import RingComm
from engine.config.load import load
from engine.config.schema import Config
from engine.data.lengths import step_lengths
from engine.hardware.timing import Stopwatch
from engine.job import Job
from engine.parallel.groups import Groups
from engine.planner.make import plan_step
from engine.planner.plan.step_plan import MicroBatch, Shard
from engine.simulator.facts import facts
from engine.units import NS

MOST_S = 290.0  # goal of the step of 1M tokens
TRL_S = {"qwen3-8b-1m-1node": 380.0, "qwen3-8b-2m-2nodes": 696.0, "qwen3-8b-4m-4nodes": 1346.0}
CLUSTER = "h200x8"


class Case(NamedTuple):
    """A model with so many layers, and further keys. The second run offloads `ratio` of the activations."""

    layers: int
    tokens: int = 2**20
    ratio: float = 0.0
    keys: tuple[str, ...] = ("recipe=qwen3-8b-1m-1node", f"cluster={CLUSTER}", "cluster.host_memory=96GiB")

    @property
    def config(self) -> Config:
        """A config for one rank that builds all of the model's weights, with the layers of this case."""
        world = ["cluster.ranks_per_node=1", "zero.stage=1", "parallel.tp=1", "optimizer.on_host=false"]
        lengths = [f"context={self.tokens}", f"capacity={self.tokens}", f"batch_tokens={self.tokens}"]
        return load([*self.keys, *world, *lengths, f"model.layers={self.layers}"])


CASES = (Case(1), Case(3, ratio=1.0))
_TINY = ("recipe=quickstart", "recompute=layer_keep_attention", "cluster.host_memory=1GiB")
TINY = (Case(1, 512, keys=_TINY), Case(3, 512, ratio=1.0, keys=_TINY))


def main() -> None:
    """Print a line per case, and the step that follows. Each case runs in a new process."""
    options = on_gpu.parse_options(__doc__)
    device, rows = on_gpu.device_of(options), list[Row]()
    for case in TINY if options.dry_run else CASES:
        rows.append(on_gpu.alone({"layers": case.layers, "tokens": case.tokens}, measured, case, options.dry_run))
        on_gpu.write(options.json, device, rows=rows)
    if not any("error" in row for row in rows):
        rows.append(step(rows[0], rows[1]))
        on_gpu.write(options.json, device, rows=rows)
    for row in rows:
        print(row.get("said", ""), flush=True)
    on_gpu.leave(rows, options.dry_run)


def measured(case: Case, dry_run: bool) -> Row:
    """Measure a case, in a new process. Without a GPU the world is one of CPU ranks."""
    with joined(load([]) if dry_run else case.config) as groups:
        return measure(case, groups)


def measure(case: Case, groups: Groups) -> Row:
    """Measure a micro-batch of one rank of the ring; then again with offload, if the case has it, else without.

    At the first one the attention kernel may build its plans for the shape, and the allocator reserve its memory.
    """
    config, micro = case.config, part(case.tokens)
    rank = OneRank.of(config, groups).with_plans()
    rank = replace(rank, context=replace(rank.context, comm=cast(RingComm, Replay())))
    watch = Stopwatch(groups.device)
    rank.offload.make_room(case.ratio, case.tokens // DEGREE)
    rank.planned(part(min(case.tokens, DEGREE * 2048)))  # compiles

    def seconds(ratio: float) -> float:
        began = watch.now()
        rank.planned(replace(micro, offload=ratio))
        return watch.now() - began

    on_gpu.new_peak(groups.device)
    first, first_peak = seconds(0.0), on_gpu.new_peak(groups.device)
    again, peak = seconds(case.ratio), on_gpu.new_peak(groups.device)
    moved = rank.offload.moved_bytes / rank.offload.saved_bytes if case.ratio else 0.0
    return {
        "first_s": first,
        "first_peak": first_peak,
        "seconds": again,
        "peak": peak,
        "moved": moved,
        "kernel": rank.context.kernel.name,
        "said": f"{case.layers} layers: {first:.3f} s at first, then with {100 * moved:.0f} % offloaded {again:.3f} s, "
        f"peaks {first_peak / 2**30:.1f} and {peak / 2**30:.1f} GiB",
    }


def part(tokens: int) -> MicroBatch:
    """The micro-batch of one rank of a ring that has a single sequence."""
    shard = Shard(0, tokens, tuple(range(DEGREE)), PART)
    return MicroBatch(index=0, rank=PART, gang=0, slot=-1, shards=(shard,))


def step(shallow: Row, deep: Row) -> Row:
    """The steps that follow from the times of two depths, the deeper one with offload."""
    modelled = {name: modelled_step(name) for name in TRL_S}
    first, (whole, other, layers) = next(iter(modelled.items()))
    layer = (deep["seconds"] - shallow["seconds"]) / (deep["layers"] - shallow["layers"])
    seconds = layer * layers + (shallow["seconds"] - shallow["layers"] * layer) + other
    ratio = seconds / whole
    steps = {name: seconds if name == first else ratio * one[0] for name, one in modelled.items()}
    beside = ", ".join(f"{name} {steps[name]:.0f} s (TRL {trl:.0f} s on H100)" for name, trl in TRL_S.items())
    return {
        "layer_s": layer,
        "step_s": seconds,
        "modelled_s": {name: one[0] for name, one in modelled.items()},
        "steps_s": steps,
        "trl_s": TRL_S,
        "not_measured_s": other,
        "said": f"a layer {layer:.3f} s; {ratio:.3f} of the modelled step; {beside}",
        "holds": seconds <= MOST_S,
    }


def modelled_step(recipe: str, write: bool = False) -> tuple[float, float, int]:
    """Seconds of the first step of a recipe by the cost model, those of it that one GPU cannot show, and its layers.

    They are read if they were prepared; `write` prepares them.
    """
    config = load([f"recipe={recipe}", f"cluster={CLUSTER}"])

    def model() -> tuple[float, float, int]:
        settings = Job(config).settings
        found = facts(plan_step(next(iter(step_lengths(config, 1))), settings), settings)
        update_s = settings.costs.step / NS
        return float(found["makespan_s"]) + update_s, settings.costs.slot / NS + update_s, config.model.layers

    return prepared(config, "modelled step", model, write)


if __name__ == "__main__":
    main()
