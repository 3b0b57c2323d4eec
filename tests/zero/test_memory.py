"""What ZeRO holds between two micro-batches equals the estimate within 2 %; else a run that should fit fails."""

from __future__ import annotations

from itertools import product
from unittest.mock import patch

import pytest
import torch

from engine.attention.context import AttentionContext
from engine.attention.kernels.choice import choose
from engine.config.load import load
from engine.config.schema import Config
from engine.cost.states import states
from engine.cost.table import ROWS
from engine.dtypes import DTYPES
from engine.models.build import build_model
from engine.models.common.initialise import initialise
from engine.trainer.optimizer import build_optimizer
from engine.zero.engine import ZeroEngine
from engine.zero.shards import sharded, stored
from tests.allocations import held, start_counting
from tests.attention.rings import unsplit
from tests.world import run_world

SHAPE = ["hidden=256", "heads=4", "kv_heads=2", "ffn=512", "layers=4"]
LAYER = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512  # q and the output, k and v, SwiGLU's three
ALL = 4 * LAYER + 9 * 256 + 2 * 258 * 256  # with the norms, the embedding and the head
BYTES = {"bf16": 2, "fp32": 4}
WORLD, TOKENS = 2, 8

pytestmark = pytest.mark.world


def passing(config: Config) -> int:
    """Bytes that are held only during a pass, by hand: stage 2's buckets, which hold all gradients in fp32, and stage
    3's two gathered layers."""
    return {1: 0, 2: 4 * ALL, 3: 2 * LAYER * BYTES[config.dtype]}[config.zero.stage]


def held_and_estimated(dtype: str, stage: int, *more: str) -> list[tuple[int, int]]:
    """(held, estimated) bytes after each micro-batch of the second step, host and device together."""
    model_keys = [f"model.{key}" for key in SHAPE]
    config = load(["recipe=quickstart", f"dtype={dtype}", f"zero.stage={stage}", *model_keys, *more])
    rows = [row for row in ROWS if "PyTorch's cache" not in row.tensor]
    # Nothing is pinned on a CPU: no rounding, and no cache of pinned memory. What is allocated counts, as on a GPU.
    with (
        patch("engine.cost.table.pinned", lambda size, many=False: size),
        patch("engine.cost.table.ROWS", rows),
        patch("engine.cost.table.uses_gpus", lambda config: True),
    ):
        estimated = states(config, WORLD)
    start_counting()
    with sharded(config):
        model = build_model(config)
    initialise(model, 0, stored=stored)
    engine = ZeroEngine(model, build_optimizer(model, config.optimizer), config)
    attention = AttentionContext(unsplit(TOKENS), None, choose(torch.device("cpu"), DTYPES[dtype], 64))
    numbers, found = torch.arange(TOKENS), []
    for _ in range(2):
        for _ in range(3):
            engine.backward(engine.forward(numbers, numbers, numbers, attention), 3 * WORLD * TOKENS)
            found.append((held(), estimated.device + estimated.host - passing(config)))
        engine.step(1e-3)
    return found[3:]


def test_what_is_counted_by_hand_is_the_model() -> None:
    model = build_model(load(["recipe=quickstart", *(f"model.{key}" for key in SHAPE)]))
    assert sum(parameter.numel() for parameter in model.parameters()) == ALL
    assert sum(one.numel() for one in model.layers["0"].parameters() if one.dim() > 1) == LAYER


SGD, AWAY = "optimizer.name=sgd", "optimizer.on_host=true"
CASES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    f"{dtype} {stage}": (dtype, stage, ()) for dtype, stage in product(("bf16", "fp32"), (1, 2, 3))
} | {
    "sgd bf16 1": ("bf16", 1, (SGD,)),
    "sgd fp32 2, no momentum": ("fp32", 2, (SGD, "optimizer.betas=[0,0.95]")),
    "sgd bf16 3, away": ("bf16", 3, (SGD, AWAY)),
}


def of_all() -> dict[str, list[tuple[int, int]]]:
    return {name: held_and_estimated(dtype, stage, *more) for name, (dtype, stage, more) in CASES.items()}


@pytest.fixture(scope="module")
def found() -> list[dict[str, list[tuple[int, int]]]]:
    return run_world(WORLD, of_all)


@pytest.mark.parametrize("name", CASES)
def test_states_between_micro_batches(found: list[dict[str, list[tuple[int, int]]]], name: str) -> None:
    for rank in found:
        for bytes_, estimated in rank[name]:
            assert bytes_ == pytest.approx(estimated, rel=0.02)


def all_on_the_host(cases: list[tuple[str, int]]) -> list[tuple[int, int]]:
    return [
        pair
        for dtype, stage in cases
        for pair in held_and_estimated(dtype, stage, AWAY, f"zero.weights_on_host={stage == 3}")
    ]


@pytest.mark.parametrize(
    "cases",
    [
        [("bf16", 1), ("fp32", 2), ("bf16", 3)],
        pytest.param([("fp32", 1), ("bf16", 2), ("fp32", 3)], marks=pytest.mark.slow),
    ],
    ids=["each stage", "others"],
)
def test_states_of_which_some_wait_on_the_host(cases: list[tuple[str, int]]) -> None:
    """On a CPU host and device share one memory: the test compares their sum."""
    for rank in run_world(WORLD, all_on_the_host, cases, timeout_s=500):
        for found, estimated in rank:
            assert found == pytest.approx(estimated, rel=0.02)
