"""Bytes that a step's rings send, counted by the transport, are those of the formula: for each rank of each plan.

If these fail, the planner and the simulator price traffic that is not there, or miss some.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from engine.attention.kernels.choice import choose
from engine.attention.layout import layout
from engine.attention.ring import attend
from engine.config.load import load
from engine.job import Job
from engine.planner.make import plan_step
from engine.planner.plan.step_plan import StepPlan
from engine.planner.settings import PlanSettings
from engine.simulator.facts import ring_bytes
from tests.attention.rings import CPU, ThreadComm, links_between
from tests.covering import covered
from tests.simulator.ring_bytes import rank_ring_bytes

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LENGTHS = np.array([1, 2, 509, 1024, 37, 751, 256, 257, 10], dtype=np.int64)


def settings(dtype: str = "fp32") -> PlanSettings:
    return Job(load(["cluster.ranks_per_node=5", "context=1K", "capacity=256", f"dtype={dtype}"])).settings


def transported(plan: StepPlan, dtype: torch.dtype, asked: PlanSettings, shape: tuple[int, int, int, int]) -> list[int]:
    """Run a step's attention, all layers of each micro-batch, and return what each rank sent."""
    links = links_between(plan.ranks)
    layers, heads, groups, head_dim = shape

    def run(rank: int) -> int:
        comm, kernel = ThreadComm(rank, links), choose(CPU, dtype, head_dim)
        for micro in plan.of_rank(rank):
            if not micro.shards:
                continue
            one = layout(micro)
            q, k, v = (torch.randn(one.tokens, count, head_dim).to(dtype) for count in (heads, groups, groups))
            out = q.requires_grad_()
            for _ in range(layers):
                with torch.no_grad():
                    for _ in range(asked.costs.forward_rings - 2):
                        attend(out, k, v, one, comm, kernel)  # the backward pass runs it again
                out = attend(out, k, v, one, comm, kernel)
            out.sum().backward()
        return comm.bytes_sent

    with ThreadPoolExecutor(plan.ranks) as pool:
        return list(pool.map(run, range(plan.ranks)))


@covered("planner, dtype, again", ["adaptive", "balanced", "static"], list(DTYPES), [0, 1])
def test_bytes_of_each_rank_are_those_of_the_formula(planner: str, dtype: str, again: int) -> None:
    asked = settings(dtype)
    asked = replace(asked, costs=replace(asked.costs, forward_rings=2 + again))
    plan = plan_step(LENGTHS, asked.by(planner))
    model = load([f"dtype={dtype}"]).model
    shape = (model.layers, model.heads, model.kv_heads, model.head_dim)
    expected = rank_ring_bytes(plan, asked)
    assert int(plan.degrees.max()) >= 4 and min(expected) > 0
    assert transported(plan, DTYPES[dtype], asked, shape) == expected
    assert sum(expected) == sum(ring_bytes(plan, asked))


def test_unsplit_sequences_send_none() -> None:
    asked = settings()
    plan = plan_step(np.array([5, 7, 100, 3, 60], dtype=np.int64), asked)
    assert int(plan.degrees.max()) == 1
    assert transported(plan, torch.float32, asked, (2, 4, 2, 8)) == rank_ring_bytes(plan, asked) == [0] * 5
