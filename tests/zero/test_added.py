"""Weight gradients that products add to those of a bucket: the update is the same, and its reductions wait for them.

If these fail, a GPU trains with gradients that lack a micro-batch, a tile or the passes after a reduction.
"""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine.close import error
from engine.config.schema import Config
from engine.models.common import product
from engine.models.common.attention import LocalAttention
from engine.offload.arena import Arena
from engine.offload.offload import Offload
from engine.trainer.optimizer import build_optimizer
from engine.zero.buckets import Bucket
from engine.zero.engine import ZeroEngine
from engine.zero.sharded import ShardedOptimizer
from tests.helpers import config, model_of
from tests.world import run_world
from tests.zero.full import masters

TOKENS, TILE, STEPS = 11, 4, 2
CASES = [
    ("zero.stage=1",),
    ("zero.stage=1", "model.tied=true"),
    ("zero.stage=1", "recompute=layer", f"mlp_tile={TILE}"),
    ("zero.stage=1", "offload.ratio=1"),
    ("zero.stage=2", f"mlp_tile={TILE}"),
]


class Watched:
    """Counts what products add, and sees whether a reduction had begun without it."""

    def __init__(self) -> None:
        self.adds, self.late, self.inside = Counter[int](), 0, 0
        self._add, self._reduce = Bucket.add_product, ShardedOptimizer.reduce_gradients
        self.optimizer: Any = None

    def add_product(self, bucket: Bucket, number: int, left: Tensor, right: Tensor) -> None:
        self.adds[id(bucket.parameters[number])] += 1
        self.late += self.optimizer._reducing and number not in bucket.pending
        self._add(bucket, number, left, right)

    def reduce_gradients(self, optimizer: ShardedOptimizer, pipeline_parallel: bool = False) -> None:
        """Counts the passes, or the steps in stage 1, that have started all reductions in hooks."""
        self.inside += optimizer._started == len(optimizer.buckets)
        self._reduce(optimizer, pipeline_parallel)


def train(settings: Config, added: bool) -> tuple[dict[str, Tensor], Watched, Counter[str]]:
    """Train two steps of two micro-batches; rank 1 reduces within its last backward pass, rank 0 every second time."""
    watched = Watched()
    away = (
        Offload(2, torch.device("cpu"), [Arena(torch.device("cpu"), 1 << 20)], 1 << 12)
        if settings.offload.ratio == 1
        else None
    )
    with (
        patch.object(product, "adds", lambda device: added),
        patch.object(Bucket, "add_product", lambda *given: watched.add_product(*given)),
        patch.object(
            ShardedOptimizer, "reduce_gradients", lambda *given, **more: watched.reduce_gradients(*given, **more)
        ),
        patch("engine.zero.initialize.bucket_elements", lambda *_: 4000),
    ):
        model = model_of(settings, away)
        engine = ZeroEngine(model, build_optimizer(model, settings.optimizer), settings)
        watched.optimizer = engine._engine.optimizer
        assert isinstance(watched.optimizer, ShardedOptimizer) and len(watched.optimizer.buckets) > 4
        positions = torch.arange(TOKENS)
        for step in range(STEPS):
            for micro in range(2):
                seed = torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank())
                tokens = torch.randint(0, 258, (TOKENS,), generator=seed)
                if away is not None:
                    away.begin(1.0, TOKENS)
                loss = engine.forward(tokens, positions, tokens, LocalAttention(positions))
                early = settings.zero.stage == 1 and micro == 1 and (dist.get_rank() or step % 2)
                if early:
                    engine.reduce_from_here()
                engine.backward(loss, 2 * TOKENS * dist.get_world_size())
            engine.step(1e-2)
    adds = Counter({name: watched.adds[id(one)] for name, one in model.named_parameters()})
    return masters(engine), watched, adds


def compared() -> list[tuple[Any, ...]]:
    found = []
    for keys in CASES:
        settings = config(2, 16, "static", "compile=never", "optimizer.clip_norm=0", *keys)
        one, watched, adds = train(settings, added=True)
        other, _, none = train(settings, added=False)
        errors = {name: error(one[name], other[name]) for name in other}
        found.append((max(errors.values()), watched.late, watched.inside, adds, none.total()))
    return found


@pytest.mark.world
def test_updates_are_the_same_and_reductions_wait_for_products() -> None:
    for rank, cases in enumerate(run_world(2, compared)):
        for keys, (worst, late, inside, adds, none) in zip(CASES, cases, strict=True):
            assert worst < 1e-6, keys
            assert late == 0 and none == 0, keys
            assert inside == (2 * STEPS if "zero.stage=2" in keys else STEPS if rank else STEPS // 2), keys
            tiles = -(-TOKENS // TILE) if f"mlp_tile={TILE}" in keys else 1
            for name, count in adds.items():
                uses = 2 * STEPS * (tiles if ".ffn." in name else 1)
                assert count == (uses if ".ffn." in name or ".attention." in name else 0), (keys, name)
