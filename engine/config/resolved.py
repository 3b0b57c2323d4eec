"""The config as one text: what a run folder keeps, what ranks read back, and how two of them differ. No Hydra here."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from engine.config.keys import PATHS
from engine.config.schema import Config
from engine.config.validate import validate
from engine.errors import ConfigError


def resolved_yaml(config: Config) -> str:
    """Return the config as YAML with every value resolved; `read_resolved` gives an equal config back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def read_resolved(path: Path) -> Config:
    """Return the config that `resolved_yaml` wrote to `path`. Raises ConfigError if it is not one."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError("cannot be read as a resolved config", key=str(path)) from error
    if not isinstance(values, Mapping):
        raise ConfigError("holds no resolved config", key=str(path))
    config, problems = validate(values)
    if config is None:
        first = problems[0]
        raise ConfigError(f"{first.key}: {first.message}", key=str(path), hint="it was written by another version")
    return config


def digest(config: Config) -> str:
    """Return the hash of the resolved text."""
    return hashlib.blake2b(resolved_yaml(config).encode(), digest_size=16).hexdigest()


def diff(old: Config, new: Config) -> list[str]:
    """Return a line `key: old -> new` for each key whose value differs; two names of one path do not."""
    before, after = _flat(old.model_dump(mode="json")), _flat(new.model_dump(mode="json"))
    differing = [key for key in before if _meant(key, before[key]) != _meant(key, after[key])]
    return [f"{key}: {before[key]} -> {after[key]}" for key in differing]


def _meant(key: str, value: Any) -> Any:
    """Return the place that a path means from here; other values, and `stdlib`, mean themselves."""
    return os.path.realpath(value) if key in PATHS and value not in (None, "stdlib") else value


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        inner = _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
        flat.update(inner)
    return flat
