"""The optimizer with its parameter groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.config.schema import Optimizer
from engine.models.common.norm import norm_weights
from engine.models.experts.layer import expert_weights
from engine.zero.experts import EXPERT_GROUP


def build_optimizer(model: nn.Module, settings: Optimizer, ep: int = 1) -> torch.optim.Optimizer:
    """Create the AdamW or SGD optimizer of a model. Weight decay applies to matrices, not to norms.

    With an `ep` degree above 1 the experts have a group of their own, because other ranks store the same ones.
    """
    parameters, norms = [p for p in model.parameters() if p.requires_grad], norm_weights(model)
    experts = expert_weights(model) if ep > 1 else set()
    matrices = [p for p in parameters if p not in norms and p not in experts]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p in norms], "weight_decay": 0.0},
        {"params": [p for p in parameters if p in experts], "weight_decay": settings.weight_decay} | EXPERT_GROUP,
    ]
    groups = [group for group in groups if group["params"]]
    # The same class for states on the device and on the host: DeepSpeedCPUAdam must be compiled, and was no faster on
    # two cores. Fused, because others allocate up to two temporary tensors as large as the states in each step.
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.betas[0], fused=True)
    assert settings.name == "adamw", f"{settings.name} is in the schema but not here"
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)
