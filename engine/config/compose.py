"""Composes the recipes with Hydra. Only the launcher runs this file; ranks never import it.

Nothing outside this file sees a DictConfig, and Hydra's logging and run directories stay off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from engine.config import tree
from engine.errors import ConfigError


def compose(overrides: Sequence[str]) -> dict[str, Any]:
    """Compose a recipe and overrides into a nested dict of plain values; `???` marks a value that must still be set.

    `overrides` are those returned by `engine.config.overrides.check`. Raises ConfigError if they cannot be composed.
    """
    try:
        with hydra.initialize_config_dir(str(tree.folder()), version_base="1.3"):
            composed = hydra.compose("config", overrides=list(overrides))
        values = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        text = next((text for text in overrides if "${" in text), None)
        raise ConfigError("cannot be resolved", key=text, hint="${...} must name another key of the recipe") from error
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}
