"""Plan invariance of a model with experts: loss, gradients, chosen experts and biases equal those of one process.

The reference runs each sequence by itself. In float64 all plans must choose the same experts for every token: a
different choice changes the loss abruptly, and the test would detect that. Error of a tensor = max|a - b| / max|b|.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine.attention.context import AttentionContext
from engine.attention.kernels.choice import choose
from engine.close import error
from engine.config.schema import Config
from engine.data.inputs import rank_inputs
from engine.data.sequences import SequenceTable
from engine.job import Job
from engine.models.common.initialise import initialise
from engine.models.decoder import Decoder
from engine.planner.make import plan_step
from engine.planner.plan.schedule import shard_spans
from engine.planner.plan.step_plan import StepPlan
from engine.trainer.optimizer import build_optimizer
from engine.trainer.step import run_step
from tests.attention.rings import unsplit
from tests.helpers import FakeReader, batch, config, family, mixtral, rank_context
from tests.simulator.ring_bytes import rank_ring_bytes
from tests.world import run_world
from tests.zero.saving import save

WORLDS = (1, 2, 3, 4)
CASES = (("static", "free", 16), ("naive", "lockstep", 16), ("balanced", "free", 40), ("adaptive", "lockstep", 40))
BALANCES = ("loss", "bias")
EXPERTS = [
    "dtype=fp64",
    "model.experts=5",
    "model.top_k=2",
    "balance.loss_weight=0.5",
    "balance.z_weight=0.1",
]
RATE = 0.01
Placed = tuple[int, int, np.ndarray, Tensor]  # sequence, layer, positions, choices
Choices = dict[tuple[int, int], Tensor]  # by sequence and layer: [tokens, k], sorted

pytestmark = pytest.mark.world


def cases(world: int) -> Iterator[tuple[str, Config]]:
    for number, (planner, mode, capacity) in enumerate(CASES):
        by = BALANCES[(number + world) % 2]
        more = [
            *EXPERTS,
            *family(True, number // 2 == world % 2),
            f"balance.by={by}",
            f"balance.bias_rate={RATE}",
            f"planner.mode={mode}",
        ]
        yield f"world {world}, {planner}, {mode}, {capacity}, {by}", config(world, capacity, planner, *more)


def plan_of(settings: Config) -> tuple[SequenceTable, FakeReader, StepPlan]:
    table, reader = batch(settings.cluster.ranks_per_node, settings.capacity)
    return table, reader, plan_step(table.length, Job(settings).settings)


def on_rank(settings: Config) -> dict[str, Any]:
    """Run one rank's micro-batches; return loss, gradients, choices by position, moved biases, bytes sent."""
    context, model = rank_context(torch.float64), mixtral(settings)
    table, reader, plan = plan_of(settings)
    seen = _listen(model)
    loss, _ = run_step(plan, model, Tensor.backward, partial(rank_inputs, reader, table), context)
    told = model.end_step(_total, int(table.loss_tokens.sum()))
    gradients = {name: p.grad for name, p in model.named_parameters()}
    biases = [experts.bias for experts in model.experts()]
    choices = list(_placed(plan, context.hdp_rank, seen, settings.model.layers))
    return {
        "loss": loss.item(),
        "gradients": gradients,
        "choices": choices,
        "biases": biases,
        "told": told,
        "sent": context.comm.bytes_sent,
        "degree": int(plan.degrees.max()),
        "idle": sum(not micro.shards for micro in plan.of_rank(context.hdp_rank)),
    }


def _total(values: Tensor) -> Tensor:
    dist.all_reduce(values)
    return values


def _listen(model: Decoder) -> list[Tensor]:
    """Make a list to which each layer of experts adds its choices when it runs."""
    seen: list[Tensor] = []
    for experts in model.experts():
        experts.register_forward_hook(lambda module, given, result: seen.append(result[1].chosen.sort(-1).values))
    return seen


def _placed(
    plan: StepPlan, rank: int, seen: list[Tensor], layers: int
) -> Iterator[tuple[int, int, np.ndarray, Tensor]]:
    """Yield sequence, layer, positions and choices of each shard of a rank."""
    for number, micro in enumerate(plan.of_rank(rank)):
        start = 0
        for shard in micro.shards:
            spans = shard_spans(shard.length, shard.degree, shard.part)
            positions = np.concatenate([np.arange(span.start, span.stop) for span in spans])
            for layer in range(layers):
                chosen = seen[number * layers + layer][start : start + len(positions)]
                yield shard.sequence, layer, positions, chosen
            start += len(positions)


def all_cases(world: int) -> list[dict[str, Any]]:
    return [on_rank(settings) for _, settings in cases(world)]


def reference(settings: Config) -> tuple[Decoder, float, Choices]:
    """Run each unsplit sequence by itself; return the model with its gradients, the loss, and the choices."""
    model, choices, total = mixtral(settings), {}, 0.0
    table, reader, _ = plan_of(settings)
    seen, kernel = _listen(model), choose(torch.device("cpu"), torch.float64, 8, prefer="reference")
    for sequence, length in enumerate(table.length.tolist()):
        tokens = torch.from_numpy(reader.tokens(0, 0, sequence, 0, length + 1))
        loss = model(tokens[:-1], torch.arange(length), tokens[1:], AttentionContext(unsplit(length), None, kernel))
        loss.backward()
        total += loss.item()
        choices |= {(sequence, layer): seen.pop(0) for layer in range(settings.model.layers)}
    return model, total, choices


def flips(ranks: list[dict[str, Any]], expected: Choices) -> tuple[int, int]:
    """Count the choices of a token in a layer that differ from the reference, and all choices."""
    differ = total = 0
    for rank in ranks:
        for sequence, layer, positions, chosen in rank["choices"]:
            differ += int((chosen != expected[sequence, layer][positions]).any(-1).sum())
            total += len(positions)
    return differ, total


@pytest.mark.parametrize("world", WORLDS)
def test_float64_is_that_of_one_process(world: int) -> None:
    degrees, idle, ranks_of = set(), 0, list(zip(*run_world(world, all_cases, world), strict=True))
    for (name, settings), ranks in zip(cases(world), ranks_of, strict=True):
        model, loss, choices = reference(settings)
        table, _, plan = plan_of(settings)
        tokens = int(table.length.sum())
        assert flips(list(ranks), choices) == (0, 2 * tokens), f"{name}: choices that flipped, of all"
        assert abs(sum(rank["loss"] for rank in ranks) - loss) < 1e-10 * loss, name
        for parameter, value in model.named_parameters():
            total = sum(rank["gradients"][parameter] for rank in ranks)
            assert error(total, value.grad) < 1e-10, f"{name}, {parameter}"
        told = model.end_step(lambda values: values, tokens)
        for rank in ranks:
            assert rank["told"] == pytest.approx(told, rel=1e-12), name
            for moved, experts in zip(rank["biases"], model.experts(), strict=True):
                assert moved is experts.bias is None or torch.equal(moved, experts.bias), name
        assert [rank["sent"] for rank in ranks] == rank_ring_bytes(plan, Job(settings).settings), name
        degrees.add(ranks[0]["degree"])
        idle += sum(rank["idle"] for rank in ranks)
    assert max(degrees) == world, "no sequence needed all ranks: the test shows too little"
    assert idle or world == 1, "no micro-batch was idle: the test shows too little"


def through_deepspeed(settings: Config, folder: Path) -> dict[str, Any]:
    """Train a step through DeepSpeed on this rank, save, and load into another model."""
    from engine.zero.engine import ZeroEngine

    def engine_of(seed: int) -> tuple[Decoder, ZeroEngine]:
        model = mixtral(settings).float()
        if seed:
            initialise(model, seed)
        return model, ZeroEngine(model, build_optimizer(model, settings.optimizer), settings)

    model, engine = engine_of(0)
    context, (table, reader, plan) = rank_context(torch.float32), plan_of(settings)
    tokens = int(table.loss_tokens.sum())
    backward = partial(engine.backward, step_loss_tokens=tokens)
    run_step(plan, engine.forward, backward, partial(rank_inputs, reader, table), context)
    norm, slots = engine.step(1.0), model.tally.expert_counts
    model.end_step(_total, tokens)
    save(engine, folder)
    again, other = engine_of(7)
    other.load(folder)
    return {"norm": norm, "expert_counts": slots, "state": model.state_dict(), "loaded": again.state_dict()}


def test_float32_through_deepspeed_and_back_from_a_checkpoint(tmp_path: Path) -> None:
    """Weights after a step are those of one process, also of experts that a rank did not use; biases are saved."""
    more = [
        *EXPERTS,
        "model.family=mixtral",
        "model.experts=60",
        "dtype=fp32",
        "balance.by=bias",
        f"balance.bias_rate={RATE}",
        "optimizer.clip_norm=0",
    ]
    settings = config(2, 16, "naive", *more)
    model, _, _ = reference(settings)
    gradients = {name: p.grad / int(plan_of(settings)[0].length.sum()) for name, p in model.named_parameters()}
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    model.end_step(lambda values: values, 1)
    for rank in run_world(2, through_deepspeed, settings, tmp_path):
        assert rank["expert_counts"].min() == 0, "all experts got tokens on this rank: the test shows too little"
        assert rank["norm"] == pytest.approx(norm, rel=1e-5)
        for name, parameter in model.named_parameters():
            change = rank["state"][name] - parameter.detach().float()
            assert error(-change, gradients[name]) < 1e-5, name
        for name, buffer in model.named_buffers():
            assert torch.equal(rank["state"][name], buffer), name
        assert all(torch.equal(rank["loaded"][name], value) for name, value in rank["state"].items())
