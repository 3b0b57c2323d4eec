"""Small engines of several kinds, and their states by name."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.config.load import load
from engine.config.schema import Config
from engine.models.build import build_model
from engine.models.common.attention import LocalAttention
from engine.models.common.initialise import initialise
from engine.trainer.optimizer import build_optimizer
from engine.zero.engine import ZeroEngine
from engine.zero.shards import gathered, sharded, stored
from tests.helpers import family
from tests.zero.full import full_states

SHAPE = ["layers=2", "hidden=20", "heads=2", "kv_heads=1", "ffn=19", "vocab=259"]  # with padding in stages 1, 2 and 3
EXPERTS = ["model.experts=3", "model.top_k=2", "balance.by=bias"]
SGD = ["optimizer.name=sgd", "optimizer.betas=[0.9,0.9]"]
KINDS = {
    "fp32": ["dtype=fp32"],
    "bf16 tied": ["dtype=bf16", "model.tied=true", *family(False, qwen3=True)],
    "bf16 experts": ["dtype=bf16", *EXPERTS, *family(True, qwen3=False)],
    "sgd without momentum": ["dtype=bf16", "optimizer.name=sgd", "optimizer.betas=[0,0]"],
    "fp32 experts, sgd": ["dtype=fp32", *EXPERTS, *SGD, *family(True, qwen3=True)],
}
TOKENS = torch.randint(0, 258, (37,), generator=torch.Generator().manual_seed(1))


@cache
def config_of(kind: str, stage: int, *more: str) -> Config:
    return load(["recipe=quickstart", *(f"model.{one}" for one in SHAPE), *KINDS[kind], f"zero.stage={stage}", *more])


def engine_of(config: Config, seed: int) -> ZeroEngine:
    with sharded(config):
        model = build_model(config).to(torch.bfloat16 if config.dtype == "bf16" else torch.float32)
    initialise(model, seed, torch.device("cpu"), stored)
    return ZeroEngine(model, build_optimizer(model, config.optimizer), config)


def train(engine: ZeroEngine, steps: int) -> list[float]:
    """Train with a batch that every rank has whole, so that worlds differ in rounding alone; return the norms."""
    positions, norms = torch.arange(37), []
    for _ in range(steps):
        loss = engine.forward(TOKENS, positions, TOKENS, LocalAttention(positions))
        engine.backward(loss, 37 * dist.get_world_size())
        norms.append(engine.step(1e-2))
    return norms


def gather(engine: ZeroEngine) -> dict[str, Any]:
    """All states of an engine by name: weights, masters, moments and buffers, and the optimizer's count of steps."""
    inner = engine._engine.optimizer
    (steps,) = {float(state.get("step", -1)) for state in inner.optimizer.state.values()} or {-1.0}  # SGD counts none
    keys = sorted({key for state in inner.optimizer.state.values() for key in state} - {"step"})
    found: dict[str, Any] = {"steps": steps, "keys": keys}
    for name, parameter in engine.module.named_parameters():
        with gathered(parameter):
            found[f"weight {name}"] = parameter.detach().clone()
    for name, states in full_states(engine).items():
        found |= {f"{key} {name}": state for key, state in states.items()}
    return found | {f"buffer {name}": buffer.clone() for name, buffer in engine.module.named_buffers()}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The names of states that are not equal to the last bit."""
    names = sorted(one.keys() | other.keys())
    same = [
        torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype
        if isinstance(one.get(name), Tensor) and isinstance(other.get(name), Tensor)
        else one.get(name) == other.get(name)
        for name in names
    ]
    return [name for name, equal in zip(names, same, strict=True) if not equal]
