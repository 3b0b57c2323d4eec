"""Import: check a Hugging Face folder wholly, say which keys make a recipe's model this one, and keep a copy."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from engine.config.load import load
from engine.config.schema import Config
from engine.errors import ConfigError, DataError, Problem
from engine.weights.check import check_weights
from engine.weights.config_json import CONFIG, MEND, in_their_words, model_values, read_config, word
from engine.weights.finite import not_finite, refusal
from engine.weights.folder import INDEX, SINGLE, Header, read_headers
from engine.weights.write import new_folder


def import_weights(folder: Path, out: Path | None) -> dict[str, Any]:
    """Check a Hugging Face folder and copy what training needs of it to `out`; return its facts and overrides.

    `angles` are the overrides of its rotary embedding, apart: a recipe for a longer context has its own.
    The copy is byte for byte, file by file: what training reads is Hugging Face's own form, so there is no second one.
    Every byte is read once, copied or not. Raises DataError of a folder that is not whole, is no model of ours, or
    holds NaN or infinity; ConfigError if `out` is there already.
    """
    if out is not None and out.exists() and folder.exists() and out.samefile(folder):
        raise ConfigError("is the folder that is imported", key="--out", hint="leave it out: training reads the folder")
    values = model_values(read_config(folder), folder / CONFIG)
    words = {key: f"model.{key}={word(value)}" for key, value in values.items()}
    angles = [text for key, text in words.items() if key.startswith("rope")]
    shape = [text for key, text in words.items() if not key.startswith("rope")]
    config, headers = _config(shape + angles, folder / CONFIG), read_headers(folder)
    check_weights(folder, config)
    if out is None:
        _read(folder, headers, None)
    else:
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
        problems = [Problem(in_their_words(f"{one.key}: {one.message}"), str(path), MEND) for one in error.problems]
        raise DataError.of(problems) from error


def _copy(folder: Path, out: Path, headers: Mapping[str, Header]) -> None:
    with new_folder(out) as draft:
        _read(folder, headers, draft)
        index = [INDEX] if SINGLE not in {header.file for header in headers.values()} else []
        for file in [*index, CONFIG]:
            shutil.copyfile(folder / file, draft / file)


def _read(folder: Path, headers: Mapping[str, Header], draft: Path | None) -> None:
    """Read all weights, and copy them to `draft` if there is one. Raises DataError if some are not finite."""
    bad: list[str] = []
    for file, several in groupby(sorted(headers.items(), key=_file), key=_file):
        if draft is not None:
            shutil.copyfile(folder / file, draft / file)
        bad += not_finite((draft or folder) / file, several)  # a copy's bytes are still in the system's cache
    if bad:
        raise refusal(bad, folder)


def _file(entry: tuple[str, Header]) -> str:
    return entry[1].file
