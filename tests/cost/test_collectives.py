"""Bytes of collectives are those that ZeRO and tensor parallelism move, counted in calls of torch.distributed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from engine.config.load import load
from engine.config.schema import Config
from engine.cost.collectives import collectives, tensor_collectives
from engine.dtypes import DTYPES
from engine.models.common.attention import LocalAttention
from engine.models.common.initialise import initialise
from engine.models.common.part import Part
from engine.models.decoder import Decoder
from engine.models.parallelize import parallelize
from engine.models.recompute import MODES
from engine.parallel.tensor import TensorParallel
from engine.trainer.optimizer import build_optimizer
from engine.zero.engine import ZeroEngine
from engine.zero.shards import sharded, stored
from tests.sent import counted
from tests.world import run_world

RANKS = 2
SHAPE = ["recipe=quickstart", "model.layers=20", "model.hidden=64", "model.ffn=192"]
SMALL_HEAD, LARGE_HEAD = "model.vocab=300", "model.vocab=3000"
CASES = [
    ["zero.stage=1", "dtype=fp32", SMALL_HEAD],
    ["zero.stage=1", "dtype=bf16", SMALL_HEAD],
    ["zero.stage=2", "dtype=fp32", SMALL_HEAD],
    ["zero.stage=2", "dtype=bf16", LARGE_HEAD],
    ["zero.stage=3", "dtype=fp32", SMALL_HEAD],
    ["zero.stage=3", "dtype=bf16", SMALL_HEAD],
    ["zero.stage=3", "dtype=fp32", LARGE_HEAD],
    ["zero.stage=3", "dtype=fp32", SMALL_HEAD, "recompute=layer"],
]


def moved(config: Config) -> list[Counter[str]]:
    """On a rank: the bytes of a forward and a backward pass and of the end of a step, after warming up."""
    with sharded(config):
        model = Decoder(config.model)
    initialise(model, 0, torch.device("cpu"), stored)
    model.run_layer = MODES[config.recompute]
    engine, tokens, losses = ZeroEngine(model, build_optimizer(model, config.optimizer), config), torch.arange(9), []
    step: tuple[Callable[[], object], ...] = (
        lambda: losses.append(engine.forward(tokens, tokens, tokens, LocalAttention(tokens))),
        lambda: engine.backward(losses.pop(), 9),
        lambda: engine.step(1e-2),
    )
    for work in step:  # stage 3 learns the order of layers
        work()
    return [counted(work) for work in step]


def all_cases() -> list[list[Counter[str]]]:
    return [moved(load([*SHAPE, *case])) for case in CASES]


@pytest.mark.world
def test_zero_moves_as_many_bytes_as_are_modelled() -> None:
    for case, (forward, backward, step) in zip(CASES, run_world(RANKS, all_cases)[0], strict=True):
        found, sent = collectives(load([*SHAPE, *case]), RANKS), (RANKS - 1) / RANKS
        gathered = forward["allgather"] + backward["allgather"]
        print(case, forward, backward, step)
        assert sent * gathered == pytest.approx(found.forward + found.backward, rel=0.02)
        assert sent * (backward.total() - backward["allgather"]) == pytest.approx(found.reduction, rel=0.02)
        # The norms' sums, and in stage 3 the norms themselves, are a few KB.
        assert sent * step.total() == pytest.approx(found.step + found.gather, rel=0.02, abs=20_000)


TENSOR_SHAPE = ["recipe=quickstart", "model.layers=3", "model.hidden=64", "model.vocab=301", "parallel.tp=2"]
TENSOR_CASES = [
    [f"dtype={dtype}", f"recompute={mode}", f"mlp_tile={tile}"]
    for dtype in ("fp32", "bf16")
    for mode in ("none", "layer", "layer_keep_attention")
    for tile in (0, 40)
]
TOKENS = 240


def moved_in_tp_group(config: Config) -> list[int]:
    """On a device of a tp group of all ranks: the bytes of the forward and of the backward pass of a micro-batch.

    Without the sums of the norms' gradients in float32, which do not grow with the tokens.
    """
    shape = config.model
    model = Decoder(shape, part=Part(range(shape.layers), tp=RANKS, tp_rank=dist.get_rank())).to(DTYPES[config.dtype])
    parallelize(model, config, torch.device("cpu"))
    TensorParallel(dist.group.WORLD, shape.vocab).apply(model)
    initialise(model, 0)
    tokens, losses = torch.arange(TOKENS), []
    forward = counted(lambda: losses.append(model(tokens, tokens, tokens, LocalAttention(tokens))))
    backward = counted(lambda: losses.pop().backward())
    norms = sum(4 * weight.numel() for name, weight in model.named_parameters() if name.endswith("norm.weight"))
    return [forward.total(), backward.total() - 2 * norms]


def all_tensor_cases() -> list[list[int]]:
    return [moved_in_tp_group(load([*TENSOR_SHAPE, *case])) for case in TENSOR_CASES]


@pytest.mark.world
def test_tensor_parallelism_moves_as_many_bytes_as_are_modelled() -> None:
    """Rows are gathered again in the backward pass, unless tiles saved them; recompute gathers them once more."""
    for case, found in zip(TENSOR_CASES, run_world(RANKS, all_tensor_cases)[0], strict=True):
        sent = [(RANKS - 1) / RANKS * total / TOKENS for total in found]
        assert sent == pytest.approx(tensor_collectives(load([*TENSOR_SHAPE, *case])), rel=1e-9), case


def test_one_device_sends_nothing() -> None:
    assert tensor_collectives(load(["recipe=quickstart"])) == (0, 0)
