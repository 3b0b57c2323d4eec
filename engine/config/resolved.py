"""The resolved config as YAML, which is saved in the run folder and read by the ranks. Does not import Hydra."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from engine.config.keys import is_path
from engine.config.schema import Config
from engine.config.sources import BUILT_IN
from engine.config.validate import validate
from engine.config.yaml_reader import MOST_BYTES, parse
from engine.errors import ConfigError
from engine.family.families import unnamed
from engine.readers import read_text

# The values that versions without a key had, by section: the saved configs of their runs do not have the key.
_EARLIER: dict[str, dict[str, Any]] = {"cluster": {"headroom": 0.0}, "data": {"separator": None}}


def resolved_yaml(config: Config) -> str:
    """Write the config as YAML with every value resolved; `read_resolved` is the inverse."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def read_resolved(path: Path) -> Config:
    """Read what `resolved_yaml` wrote. Raises ConfigError if the file is not a valid config.

    PermissionError and errors of the storage pass: the file is not damaged.
    """
    hint = "restore this file, or start a new run with another run.out"
    try:
        text = read_text(path, MOST_BYTES, ConfigError, hint)
    except FileNotFoundError as error:
        raise ConfigError("cannot be read as a resolved config", key=str(path), hint=hint) from error
    values = parse(text, str(path), ConfigError, hint)
    if not isinstance(values, Mapping):
        raise ConfigError("is not a resolved config", key=str(path), hint=hint)
    earlier = {
        name: {**added, **values[name]} for name, added in _EARLIER.items() if isinstance(values.get(name), Mapping)
    }
    model = values.get("model")
    if isinstance(model, Mapping) and isinstance(model.get("experts"), int):
        earlier["model"] = {"family": unnamed(model["experts"]), **model}
    config, problems = validate({**values, **earlier})
    if config is None:
        first = problems[0]
        hint = "another version of ByteScale wrote this file"
        raise ConfigError(f"{first.key}: {first.message}", key=str(path), hint=hint)
    return config


def digest(config: Config) -> str:
    """Return a hash of all values of the config, as 32 hex digits."""
    return hashlib.blake2b(resolved_yaml(config).encode(), digest_size=16).hexdigest()


def diff(old: Config, new: Config) -> list[str]:
    """Return a line `key: old -> new` per changed value. Two spellings of the same path are not a change."""

    def meaning(key: str, value: Any) -> Any:
        if isinstance(value, list):
            return [meaning(key, one) for one in value]
        return os.path.realpath(value) if is_path(key) and value not in (None, *BUILT_IN, "bytes") else value

    before, after = flat(old.model_dump(mode="json")), flat(new.model_dump(mode="json"))
    both = {**before, **after}
    changed = [key for key in both if meaning(key, before.get(key)) != meaning(key, after.get(key))]
    old_texts, new_texts = (
        ["not set" if at.get(key) is None else at[key] for key in changed] for at in (before, after)
    )
    return [f"{key}: {was} -> {now}" for key, was, now in zip(changed, old_texts, new_texts, strict=True)]


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested values to dotted keys, after `prefix`: {"run": {"steps": 3}} becomes {"run.steps": 3}."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
