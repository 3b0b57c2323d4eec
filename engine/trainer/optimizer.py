"""The update rule: parameter groups, and the learning rate of each step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from engine.config.schema import Optimizer
from engine.models.llama.layers import norms_of
from engine.zero.host_adam import host_adamw


def build_optimizer(model: nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer; weight decay acts on matrices only, not on norms."""
    parameters, norms = [p for p in model.parameters() if p.requires_grad], norms_of(model)
    groups = [
        {"params": [p for p in parameters if p not in norms], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p in norms], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    # Fused ones hold nothing beside their states; the others hold up to two more tensors of their size in a step.
    if settings.name == "sgd":  # the same wherever its states are
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.betas[0], fused=True)
    own: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps}
    return host_adamw(groups, **own) if settings.on_host else torch.optim.AdamW(groups, fused=True, **own)


def learning_rate(step: int, steps: int, settings: Optimizer) -> float:
    """Return the rate of update `step` (from 1) of `steps`: linear warm-up, then a cosine down to its floor."""
    if step <= settings.warmup_steps:
        return settings.lr * step / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(steps - settings.warmup_steps, 1)
    floor = settings.min_lr_ratio
    return settings.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))
