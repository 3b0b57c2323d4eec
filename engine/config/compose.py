"""Composes the recipes with Hydra: the only file that runs it, in the launcher only and never on ranks.

Beyond this file there is no DictConfig, no Hydra logging and no run directory of Hydra's.
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
    """Return the composed recipe as plain values; `???` stands where a value must be set.

    Overrides are those that `overrides.check` let through. Raises ConfigError if they do not go together.
    """
    try:
        with hydra.initialize_config_dir(str(tree.folder()), version_base="1.3"):
            composed = hydra.compose("config", overrides=list(overrides))
        values = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        text = next((text for text in overrides if "${" in text), None)
        raise ConfigError("cannot be composed", key=text, hint="${...} must name another key of the recipe") from error
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}
