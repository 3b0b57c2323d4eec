"""A model by itself, as plain PyTorch code, against the same model with the attention of a run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.attention.context import AttentionContext
from engine.attention.kernels.choice import choose
from engine.attention.layout import layout
from engine.close import error
from engine.config.load import load
from engine.family.families import unnamed
from engine.models.build import build_model
from engine.models.common.attention import PackedAttention
from engine.models.common.initialise import initialise
from engine.planner.plan.step_plan import MicroBatch, Shard

LENGTHS = (5, 1, 30, 12)
SIZE = ["layers=2", "hidden=32", "heads=4", "kv_heads=2", "ffn=48", "vocab=50"]


@pytest.mark.parametrize("experts", [1, 4])
def test_a_model_by_itself_attends_within_each_packed_sequence(experts: int) -> None:
    """Loss and every gradient in float64, with the load balancing loss of each sequence."""
    model = build_model(
        load(
            [
                f"model.family={unnamed(experts)}",
                f"model.experts={experts}",
                "model.top_k=1",
                *(f"model.{key}" for key in SIZE),
            ]
        )
    )
    initialise(model, 3)
    model.double()
    tokens = torch.randint(0, 50, (sum(LENGTHS) + 1,), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    shards = tuple(Shard(number, length, (0,), 0) for number, length in enumerate(LENGTHS))
    context = AttentionContext(
        layout(MicroBatch(0, 0, 0, -1, shards)), None, choose(torch.device("cpu"), torch.float64, 8)
    )

    def loss_and_gradients(attention: PackedAttention | None) -> list[Tensor]:
        loss = model(tokens[:-1], positions, tokens[1:], attention)
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    for found, expected in zip(loss_and_gradients(None), loss_and_gradients(context), strict=True):
        assert error(found, expected, least=1e-9) < 1e-10
