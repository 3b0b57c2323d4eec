"""Execution plans that cuDNN builds in training, and the attention that runs on the slower kernel instead.

    python benchmarks/plan_builds.py [--json] [--steps 50]

The real planner plans the steps of a 1B model on 8 ranks (capacity 8K, context 64K, 512K tokens a step; layers are
recomputed in the backward pass) for three corpora. Each rank's kernel calls are those of its layouts and ring
schedules; no tensor is computed. Three rules are compared: cuDNN for every call of one length from 4,096 tokens on (the
rule until commit 3f16df9), the rule of `engine/attention/kernels/plans.py`, and the best decision per shape in
hindsight. Seconds are estimates with the constants of that file: those of building plans, and those lost on the slower
kernel.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from engine.attention.kernels.call import Call
from engine.attention.kernels.plans import CudnnRun, Heads, PlanCosts, Plans, Shape, cudnn_runs, runs
from engine.attention.layout import call_of, layout
from engine.config.load import load
from engine.config.schema import Config
from engine.cost.datasheets import nominal
from engine.cost.times import rounds_per_call
from engine.data.lengths import step_lengths
from engine.planner.make import plan_step
from engine.planner.plan.step_plan import StepPlan
from engine.planner.settings import PlanSettings

CORPORA = ("data", "github", "byted")  # `data` is the quickstart's: the standard library's source files
SETTINGS = ("recipe=h200-1b-64k", "cluster.ranks_per_node=8", "capacity=8K", "context=64K", "recompute=layer")
OLD_LEAST_TOKENS = 4096
FIRST_STEPS = 10  # not counted: most shapes that come again are new in them
COSTS = PlanCosts(nominal("h200x8").plan_build_s)


class ThreadCall(NamedTuple):
    """A kernel call of a rank. PyTorch keeps cuDNN's plans per thread."""

    autograd: bool  # whether autograd's thread makes it: backward passes, and forward passes of recomputed layers
    backward: bool
    call: Call

    @property
    def pairs(self) -> float:
        """(query, key) pairs."""
        sizes = zip(pairwise(self.call.q_bounds), pairwise(self.call.kv_bounds), strict=True)
        all_pairs = sum((q_stop - q) * (k_stop - k) for (q, q_stop), (k, k_stop) in sizes)
        return all_pairs / 2 if self.call.causal else float(all_pairs)

    def cudnn_runs(self, config: Config) -> tuple[CudnnRun, ...]:
        """The runs of the call that may use cuDNN."""
        model = config.model
        heads = Heads(model.heads, model.kv_heads, model.head_dim, torch.bfloat16)
        return cudnn_runs(self.call, self.backward, heads, COSTS)


def main() -> None:
    """Print a row per corpus and rule."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    rows = [row for corpus in CORPORA for row in measure(corpus, arguments.steps)]
    if arguments.json:
        print(json.dumps({"steps": arguments.steps, "rows": rows}))
        return
    print(f"per rank and step, steps {FIRST_STEPS + 1} to {arguments.steps}, mean over ranks")
    print("| corpus | rule | plans built | of the busiest rank | pairs on cuDNN | building, s | lost, s |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        counts = f"{row['builds']:.2f} | {row['builds_worst']:.2f} | {row['cudnn_pairs']:.1%}"
        print(f"| {row['corpus']} | {row['rule']} | {counts} | {row['build_s']:.2f} | {row['lost_s']:.2f} |")


def measure(corpus: str, steps: int, settings: tuple[str, ...] = SETTINGS) -> list[dict[str, Any]]:
    """Plan the steps of a corpus, and count what each rule does on every rank. Returns a row for each rule."""
    config = load([*settings, f"lengths={corpus}"])
    plan_settings = PlanSettings.of(config)
    plans = [plan_step(lengths, plan_settings) for lengths in step_lengths(config, steps)]
    ranks = [[list(rank_calls(plan, rank, config)) for plan in plans] for rank in range(plan_settings.ranks)]
    rows = []
    for name, rule in (("old", old_rule), ("new", new_rule), ("hindsight", hindsight)):
        found = [rule(calls, config) for calls in ranks]
        means = {key: sum(one[key] for one in found) / len(found) for key in found[0]}
        worst = max(one["builds"] for one in found)
        rows.append({"corpus": corpus, "rule": name, **means, "builds_worst": worst})
    return rows


def rank_calls(plan: StepPlan, rank: int, config: Config) -> Iterator[ThreadCall]:
    """Yield the kernel calls of one layer of each micro-batch of a rank, forward and backward.

    The layers' calls are equal, so that every call counts `layers` times.
    """
    for micro in plan.of_rank(rank):
        if not micro.shards:
            continue
        one = layout(micro, rounds_per_call(plan.stages))
        causal = one.causal_call()
        calls = [causal] if causal else []
        calls += [call_of(blocks) for number in range(one.calls("forward")) if (blocks := one.blocks(number))]
        yield from (ThreadCall(False, False, call) for call in calls)
        if config.recompute == "layer":
            yield from (ThreadCall(True, False, call) for call in calls)
        yield from (ThreadCall(True, True, call) for call in calls)


class Tally:
    """Sums over the counted steps of one rank."""

    def __init__(self, config: Config, steps: int) -> None:
        self._config, self._counted = config, steps - FIRST_STEPS
        self._pairs = self._cudnn_pairs = self._lost_s = 0.0
        self._builds = 0

    def count(self, step: int, one: ThreadCall) -> None:
        """Add the pairs of a call of all layers."""
        if step >= FIRST_STEPS:
            self._pairs += one.pairs * self._config.model.layers

    def add(self, step: int, one: CudnnRun, cudnn: int, built: bool) -> None:
        """Add a run of a call of all layers, of which `cudnn` used cuDNN; `built` says that its shape got a plan."""
        if step < FIRST_STEPS:
            return
        self._cudnn_pairs += one.shape.pairs * cudnn
        self._builds += built
        self._lost_s += one.saved_s * (self._config.model.layers - cudnn)

    def row(self) -> dict[str, float]:
        """Return plans built, seconds of building and seconds lost per step, and the fraction of pairs on cuDNN."""
        builds = self._builds / self._counted
        return {
            "builds": builds,
            "cudnn_pairs": self._cudnn_pairs / self._pairs,
            "build_s": builds * COSTS.build_s,
            "lost_s": self._lost_s / self._counted,
        }


Uses = Callable[[ThreadCall, CudnnRun], int]  # how many of the layers compute a run of a call with cuDNN


def old_rule(steps: list[list[ThreadCall]], config: Config) -> dict[str, float]:
    """Use cuDNN for all calls of one length from 4,096 queries or keys on."""

    def uses(one: ThreadCall, run: CudnnRun) -> int:
        large = max(run.shape.run.queries, run.shape.run.keys) >= OLD_LEAST_TOKENS
        return config.model.layers if large and len(runs(one.call)) == 1 else 0

    return tallied(steps, config, uses)


def new_rule(steps: list[list[ThreadCall]], config: Config) -> dict[str, float]:
    """Use cuDNN as `Plans` decides, with a table for each of the two threads."""
    tables = (Plans(COSTS), Plans(COSTS))

    def uses(one: ThreadCall, run: CudnnRun) -> int:
        return sum(tables[one.autograd].use_cudnn(run) for _ in range(config.model.layers))

    return tallied(steps, config, uses)


def hindsight(steps: list[list[ThreadCall]], config: Config) -> dict[str, float]:
    """Use cuDNN from the first call on for the shapes whose plan pays over all steps."""
    saved: defaultdict[tuple[bool, Shape], float] = defaultdict(float)
    for one in (one for calls in steps for one in calls):
        for run in one.cudnn_runs(config):
            saved[one.autograd, run.shape] += run.saved_s * config.model.layers

    def uses(one: ThreadCall, run: CudnnRun) -> int:
        return config.model.layers if saved[one.autograd, run.shape] > COSTS.build_s else 0

    return tallied(steps, config, uses)


def tallied(steps: list[list[ThreadCall]], config: Config, uses: Uses) -> dict[str, float]:
    """Sum over the steps of a rank what a rule does."""
    tally, built = Tally(config, len(steps)), set[tuple[bool, Shape]]()
    for step, calls in enumerate(steps):
        for one in calls:
            tally.count(step, one)
            for run in one.cudnn_runs(config):
                cudnn, plan = uses(one, run), (one.autograd, run.shape)
                tally.add(step, run, cudnn, built=cudnn > 0 and plan not in built)
                if cudnn:
                    built.add(plan)
    return tally.row()


if __name__ == "__main__":
    main()
