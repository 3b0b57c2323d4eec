"""From a shape to its model."""

from __future__ import annotations

from torch import nn

from engine.config.schema import Model
from engine.models.llama.model import Llama


def build(shape: Model) -> nn.Module:
    """Return the model of a shape, its weights not yet drawn."""
    return Llama(shape)
