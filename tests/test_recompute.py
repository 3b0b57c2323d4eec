"""Recompute in rings: every mode gives bitwise equal gradients.

If these fail, what a run learns depends on its memory settings.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.data.inputs import rank_inputs
from engine.job import Job
from engine.models.recompute import MODES
from engine.planner.make import plan_step
from engine.simulator.facts import ring_bytes
from engine.trainer.step import run_step
from tests.helpers import batch, config, deepspeed_run, llama, rank_context
from tests.world import run_world

WORLD, CAPACITY = 3, 24
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}

pytestmark = pytest.mark.world


def results() -> dict[tuple[str, str], dict[str, Any]]:
    """On one rank: the gradients and the bytes of each mode and dtype, and two steps of each through DeepSpeed."""
    found = {}
    for name, dtype in DTYPES.items():
        context = rank_context(dtype)
        for mode in MODES:
            settings = config(WORLD, CAPACITY, "balanced", f"recompute={mode}", f"dtype={name}")
            table, reader = batch(WORLD, CAPACITY)
            plan, model = plan_step(table.length, Job(settings).settings), llama(settings, dtype)
            before = context.comm.bytes_sent
            loss, _ = run_step(plan, model, Tensor.backward, partial(rank_inputs, reader, table), context)
            found[mode, name] = {
                "values": [loss, *(parameter.grad for parameter in model.parameters())],
                "sent": context.comm.bytes_sent - before,
                "formula": sum(ring_bytes(plan, Job(settings).settings)),
            }
    for mode in MODES:
        settings = config(WORLD, CAPACITY, "balanced", f"recompute={mode}")
        stepped = deepspeed_run(settings, [batch(WORLD, CAPACITY, step) for step in range(2)], 2.0)
        found[mode, "deepspeed"] = {"values": [torch.tensor(stepped["norms"]), *stepped["change"].values()]}
    return found


def test_gradients_are_those_of_none_to_the_last_bit_and_bytes_those_of_the_formula() -> None:
    ranks = run_world(WORLD, results)
    for name in (*DTYPES, "deepspeed"):
        for mode in MODES:
            for rank in ranks:
                found, expected = rank[mode, name]["values"], rank["none", name]["values"]
                assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), (mode, name)
    for name in DTYPES:
        sent = {mode: sum(rank[mode, name]["sent"] for rank in ranks) for mode in MODES}
        assert sent == {mode: ranks[0][mode, name]["formula"] for mode in MODES}
        assert sent["layer"] > sent["none"] == sent["layer_keep_attention"] > 0
