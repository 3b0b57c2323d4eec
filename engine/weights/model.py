"""The model of a Hugging Face folder, by its config.json, as keys of `model`. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from engine.config.load import load, read_resolved
from engine.config.resolved import flat
from engine.config.schema import Config
from engine.config.weights import Theirs
from engine.data.tokenizers.load import IN_FOLDER
from engine.errors import ConfigError, DataError, Problem
from engine.run.checkpoints import newest_first
from engine.run.folder import RunFolder
from engine.weights.config_json import CONFIG, FIX, model_values, override_value, read_config, with_their_keys


class Described(NamedTuple):
    """The model of a Hugging Face folder, by its config.json."""

    config: Config  # the quickstart with this model
    overrides: list[str]  # all keys of `model`


def read_model(folder: Path, place: str | None = None) -> Described:
    """Read config.json. Raises DataError if it is missing or invalid, or describes no model of ours.

    `place` is how errors name the folder, by default its path.
    """
    values = model_values(read_config(folder, place), folder / CONFIG)
    try:
        config = load([f"model.{key}={override_value(value)}" for key, value in values.items()])  # checks heads, sizes
    except ConfigError as error:
        path = str(folder / CONFIG)
        problems = [Problem(with_their_keys(f"{one.key}: {one.message}"), path, FIX) for one in error.problems]
        raise DataError.of(problems) from error
    every = flat(config.model.model_dump(mode="json"))
    return Described(config, [f"model.{key}={override_value(value)}" for key, value in every.items()])


def model_of(weights: str, out: str) -> Theirs:
    """Return the model of `run.weights`, and the tokenizer in its folder; see `engine.config.weights`.

    A run that has saved checkpoints in `out` keeps both: its rotary embedding may be another, and it no longer needs
    the weights. Raises DataError for a folder that is missing, or describes no model of ours.
    """
    before, folder = _of_run(weights, RunFolder(Path(out))), Path(weights)
    if before is not None and not folder.is_dir():
        return before
    theirs = flat(read_model(folder, f"run.weights={weights}").config.model.model_dump(mode="json"))
    if before is not None:
        shape = (key for key in theirs if not key.startswith(("rope", "name")))
        if all(before.model[key] == theirs[key] for key in shape):
            return before
    return Theirs(theirs, weights if any((folder / name).is_file() for name in IN_FOLDER) else None)


def _of_run(weights: str, folder: RunFolder) -> Theirs | None:
    """Return model and tokenizer of a run with checkpoints that began with these weights; None if there is none."""
    try:
        if not newest_first(folder.checkpoints):
            return None
        config = read_resolved(folder.resolved)
    except (OSError, ConfigError):
        return None
    same = config.run.weights is not None and os.path.realpath(config.run.weights) == os.path.realpath(weights)
    return Theirs(flat(config.model.model_dump(mode="json")), config.data.tokenizer) if same else None
