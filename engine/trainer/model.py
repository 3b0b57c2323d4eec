"""The model of a run on one rank: made, drawn or loaded, and put on its device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from engine.config.schema import Config
from engine.cost.activations import layers_bytes
from engine.cost.model import PPM
from engine.dtypes import DTYPES
from engine.errors import MemoryFitError, Problem
from engine.memory.arena import Arena
from engine.memory.offload import GAPS, Offload
from engine.models.build import build_model
from engine.models.fuse import fuse
from engine.models.llama.model import Llama
from engine.planner.loads import micro_tokens
from engine.planner.plan import StepPlan
from engine.weights.load import load_weights
from engine.zero.shards import sharded, whole


def make_model(config: Config, device: torch.device, weights: str | None = None) -> Llama:
    """Return a config's model with the weights of the Hugging Face folder `weights`, or drawn; all ranks call it."""
    dtype = DTYPES[config.dtype]
    with sharded(config):
        model = build_model(config)
    if weights is None:
        model.initialise(config.run.seed, whole)
    else:
        load_weights(model.to(dtype), config.model, Path(weights), whole)
    model.to(device)
    fuse(model, device, dtype, config.compile)
    return model


def room_for(plan: StepPlan, rank: int, offload: Offload) -> Problem | None:
    """Let the host have the room that a rank's part of a step takes there; return why not, if it does not give it."""
    mine = slice(plan.micro_start[rank], plan.micro_start[rank + 1])
    loads = zip(plan.offload[mine].tolist(), micro_tokens(plan)[mine].tolist(), strict=True)
    ratio, tokens = max(loads, key=lambda load: load[0] * load[1])
    try:
        offload.make_room(ratio / PPM, tokens)
    except MemoryFitError as error:
        problem = error.problems[0]
        return replace(problem, message=f"rank {rank}: {problem.message}")
    return None


def make_offload(config: Config, device: torch.device, room: int) -> Offload:
    """Return where a config's activations wait that plans send to the host: in `room` bytes of it, and small gaps.

    The launcher has looked that the host has them (engine/launch/host_memory.py). Plans know no gaps, so without them a
    plan that fills the room would leave its last tensors on the device.
    """
    layers = config.model.layers
    kept = layers_bytes(config.model, config.dtype, config.recompute, config.mlp_tile) // layers
    return Offload(layers, device, Arena(device, room + layers * GAPS), kept)
