from __future__ import annotations

import pytest
import torch

from engine.config.load import load
from engine.config.schema import Optimizer
from engine.models.decoder import Decoder
from engine.trainer.optimizer import build_optimizer
from tests.allocations import allocated

RECIPE = load(["recipe=quickstart"]).optimizer.model_dump() | {"lr": 1.0, "warmup_steps": 10, "min_lr_ratio": 0.1}


def settings(**changes: object) -> Optimizer:
    return Optimizer(**(RECIPE | changes))


def test_decay_acts_on_matrices_only() -> None:
    model = Decoder(load(["recipe=quickstart"]).model)
    groups = build_optimizer(model, settings(weight_decay=0.1)).param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        assert decay[id(parameter)] == (0.0 if "norm" in name else 0.1), name


def test_adamw_is_the_recipe_of_llama() -> None:
    optimizer = build_optimizer(torch.nn.Linear(2, 2), settings())
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_an_update_holds_nothing_beside_the_states(name: str) -> None:
    layer = torch.nn.Linear(1000, 1000, bias=False)
    optimizer = build_optimizer(layer, settings(name=name))
    layer.weight.grad = torch.ones(1000, 1000)
    optimizer.step()  # creates the states
    assert allocated(optimizer.step).peak < 1000
