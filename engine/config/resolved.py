"""The resolved config as YAML, which is saved in the run folder and read by the ranks. Does not import Hydra."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from engine.config import versions
from engine.config.keys import is_path
from engine.config.schema import Config
from engine.config.sources import BUILT_IN
from engine.config.validate import validate
from engine.config.yaml_reader import MOST_BYTES, parse
from engine.errors import ConfigError
from engine.format_number import format_number
from engine.readers import read_text

FORMAT = "format"  # the first key of the file: the number of its format (versions.py)
_RESTORE = "restore this file, or start a new run with another run.out"


def resolved_yaml(config: Config) -> str:
    """Write the config as YAML with every value resolved; `read_resolved` is the inverse."""
    values = {FORMAT: versions.newest(), **config.model_dump(mode="json")}
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def read_resolved(path: Path, restore: str = _RESTORE) -> Config:
    """Read what `resolved_yaml` wrote, in this version or an earlier one.

    Raises ConfigError with the hint `restore` if the file is not a valid config, and with a hint of its own if a newer
    version wrote it. PermissionError and errors of the storage pass: the file is not damaged.
    """
    try:
        text = read_text(path, MOST_BYTES, ConfigError, restore)
    except FileNotFoundError as error:
        raise ConfigError("cannot be read as a resolved config", key=str(path), hint=restore) from error
    values = parse(text, str(path), ConfigError, restore)
    if not isinstance(values, dict):
        raise ConfigError("is not a resolved config", key=str(path), hint=restore)
    config, problems = validate(upgraded(values, str(path)))
    if config is None:
        first = problems[0]
        raise ConfigError(f"{first.key}: {first.message}", key=str(path), hint=restore)
    return config


def upgraded(values: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the nested values of a saved config as this version would have saved them, without the number.

    Raises ConfigError at `place` if the number of its format is wrong or that of a newer version.
    """
    written = format_number(values, versions.newest(), place, ConfigError, key=FORMAT)
    added = versions.added(flat(values), written)
    new = _without({FORMAT} | versions.gone(written), values)
    for key, value in added.items():
        *sections, name = key.split(".")
        inside: Any = new
        for one in sections:
            inside = inside.setdefault(one, {}) if isinstance(inside, dict) else None
        if isinstance(inside, dict):  # else `validate` reports what is in the place of a section
            inside.setdefault(name, value)
    return new


def _without(keys: Collection[str], values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Copy nested values without these dotted keys, and without sections that have no other key."""
    found = dict[str, Any]()
    for name, value in values.items():
        key = f"{prefix}{name}"
        inner = _without(keys, value, f"{key}.") if isinstance(value, Mapping) else value
        if key not in keys and (inner == value or inner):
            found[name] = inner
    return found


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
