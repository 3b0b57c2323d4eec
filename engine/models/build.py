"""Creates the model that a config describes."""

from __future__ import annotations

from engine.config.schema import Config
from engine.models.common.part import Part
from engine.models.decoder import Decoder


def build_model(config: Config, part: Part | None = None) -> Decoder:
    """Create the single-device model of a config, or a part of it. Its weights are uninitialised."""
    return Decoder(config.model, config.balance, part)
