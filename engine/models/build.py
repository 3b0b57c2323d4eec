"""The model of a config: the one place that knows which there are."""

from __future__ import annotations

from engine.config.schema import Config
from engine.models.llama.model import Llama
from engine.models.mixtral.model import Mixtral


def build_model(config: Config) -> Llama:
    """Return the model of a config; its weights are not drawn yet."""
    if config.model.experts > 1:
        return Mixtral(config.model, config.balance, mode=config.recompute, tile=config.mlp_tile)
    return Llama(config.model, mode=config.recompute, tile=config.mlp_tile)
