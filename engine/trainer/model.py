"""The model of a run on one rank: made, drawn or loaded, and put on its device."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.config.schema import Config
from engine.cost.memory import saved_bytes
from engine.dtypes import DTYPES
from engine.memory.arena import Arena
from engine.memory.offload import Offload
from engine.models.build import build_model
from engine.models.fuse import fuse
from engine.models.llama.model import Llama
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


def make_offload(config: Config, device: torch.device) -> Offload:
    """Return where a config's activations wait that plans send to the host: in `cluster.host_memory` bytes at most."""
    arena = Arena(device, config.cluster.host_memory)
    saved = saved_bytes(config.model, config.dtype, config.recompute, config.mlp_tile)
    return Offload(config.model.layers, device, arena, saved)
