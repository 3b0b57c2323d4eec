"""Import: check a Hugging Face folder wholly, say which keys make a recipe's model this one, and keep a copy."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.config.load import load
from engine.config.schema import Config
from engine.errors import ConfigError, DataError, Problem
from engine.weights.check import check_weights
from engine.weights.config_json import CONFIG, model_values, read_config, word
from engine.weights.folder import INDEX, SINGLE, Header, read_headers
from engine.weights.write import new_folder


def import_weights(folder: Path, out: Path | None) -> dict[str, Any]:
    """Check a Hugging Face folder and copy what training needs of it to `out`; return its facts and overrides.

    `angles` are the overrides of its rotary embedding, apart: a recipe for a longer context has its own.
    The copy is byte for byte, file by file: what training reads is Hugging Face's own form, so there is no second one.
    Raises DataError of a folder that is not whole or is no model of ours; ConfigError if `out` is there already.
    """
    values = model_values(read_config(folder), folder / CONFIG)
    words = {key: f"model.{key}={word(value)}" for key, value in values.items()}
    angles = [text for key, text in words.items() if key.startswith("rope")]
    shape = [text for key, text in words.items() if not key.startswith("rope")]
    config, headers = _config(shape + angles, folder / CONFIG), read_headers(folder)
    check_weights(folder, config)
    if out is not None:
        _copy(folder, out, headers)
    return {
        "out": str(out or folder),
        "model": config.model.model_dump(mode="json"),
        "tensors": len(headers),
        "parameters": sum(math.prod(header.shape) for header in headers.values()),
        "shards": len({header.file for header in headers.values()}),
        "overrides": [*shape, f"run.weights={out or folder}"],
        "angles": angles,
    }


def _config(overrides: list[str], path: Path) -> Config:
    """Return a config with the model of a config.json; recipes' rules judge it: heads, sizes, rotary scaling."""
    try:
        return load(overrides)
    except ConfigError as error:
        problems = [Problem(f"{one.key}: {one.message}", str(path)) for one in error.problems]
        raise DataError.of(problems) from error


def _copy(folder: Path, out: Path, headers: Mapping[str, Header]) -> None:
    files = sorted({header.file for header in headers.values()})
    with new_folder(out) as draft:
        for file in [*files, *([] if SINGLE in files else [INDEX]), CONFIG]:
            shutil.copyfile(folder / file, draft / file)
