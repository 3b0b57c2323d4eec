"""The optimizer with its parameter groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.config.schema import Optimizer
from engine.cost.optimizers import OPTIMIZERS
from engine.models.common.norm import norm_weights
from engine.models.experts.layer import expert_weights

Groups = dict[str, dict[str, Any]]  # PyTorch's parameter groups by kind of parameter


def build_optimizer(model: nn.Module, settings: Optimizer, ep: int = 1) -> torch.optim.Optimizer:
    """Create the optimizer of a model. Weight decay applies to matrices, not to norms.

    Experts have a separate group with an `ep` degree above 1, because other ranks store the same ones, and if the
    optimizer keeps other states for them. Otherwise they are matrices.
    """
    chosen, norms = OPTIMIZERS[settings.name], norm_weights(model)
    states = chosen.states(settings)
    experts = expert_weights(model) if ep > 1 or states["expert"] != states["matrix"] else set()
    groups: Groups = {
        "matrix": {"params": [], "weight_decay": settings.weight_decay, "experts": False},
        "vector": {"params": [], "weight_decay": 0.0, "experts": False},
        "expert": {"params": [], "weight_decay": settings.weight_decay, "experts": True},  # for engine/zero/sharded.py
    }
    for parameter in model.parameters():
        if parameter.requires_grad:
            kind = "vector" if parameter in norms else "expert" if parameter in experts else "matrix"
            groups[kind]["params"].append(parameter)
    optimizer: torch.optim.Optimizer = chosen.build(
        {kind: group for kind, group in groups.items() if group["params"]}, settings
    )
    return optimizer


# The same classes for states on the device and on the host: DeepSpeedCPUAdam must be compiled, and was no faster on two
# cores. Fused, because others allocate up to two temporary tensors as large as the states in each step.


def adamw(groups: Groups, settings: Optimizer) -> torch.optim.Optimizer:
    return torch.optim.AdamW([*groups.values()], lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)


def sgd(groups: Groups, settings: Optimizer) -> torch.optim.Optimizer:
    """SGD with the first beta as its momentum."""
    return torch.optim.SGD([*groups.values()], lr=settings.lr, momentum=settings.betas[0], fused=True)
