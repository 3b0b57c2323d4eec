"""Imports weights: checks a Hugging Face folder, finds the overrides that fit a recipe to its model, and copies it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from engine.data.tokenizers.load import IN_FOLDER
from engine.errors import ConfigError
from engine.weights.check import check_weights
from engine.weights.config_json import CONFIG
from engine.weights.finite import not_finite, not_finite_error
from engine.weights.folder import INDEX, SINGLE, Header, copy_file, read_headers
from engine.weights.generation import GENERATION, read_generation
from engine.weights.model import read_model
from engine.weights.tokenizer import copy_tokenizer
from engine.weights.write import new_folder


def import_weights(folder: Path, out: Path | None) -> dict[str, Any]:
    """Check a Hugging Face folder, and copy the files that training needs to the new folder `out` if it is given.

    Returns a summary for the user. Its `overrides` set a recipe's model, tokenizer and weights to these. Files are
    copied unchanged, because training reads Hugging Face's format. Without a copy, all weights are read too, to find
    NaN and infinity. Raises DataError for a folder that is incomplete, contains NaN or infinity, or has an
    unsupported model, and ConfigError if `out` is `folder`, or exists and is not empty.
    """
    if out is not None and out.exists() and folder.exists() and out.samefile(folder):
        hint = "omit --out: training can read this folder"
        raise ConfigError("is the folder being imported", key="--out", hint=hint)
    # Everything small is checked before the weights are read, which takes minutes.
    config, overrides = read_model(folder)
    headers = read_headers(folder)
    check_weights(folder, config)
    read_generation(folder)  # raises for one that cannot be used
    tokenizer = any((folder / name).is_file() for name in IN_FOLDER)
    if out is None:
        _read_files(folder, headers, None)
    else:
        # config.json is copied last: a folder without it is not a model.
        with new_folder(out) as draft:
            _read_files(folder, headers, draft)
            single = SINGLE in {header.file for header in headers.values()}
            if tokenizer:
                copy_tokenizer(str(folder), draft)
            more = [GENERATION] if (folder / GENERATION).is_file() else []
            for file in [*more, CONFIG] if single else [*more, INDEX, CONFIG]:
                copy_file(folder / file, draft / file)
    return {
        "out": str(out or folder),
        "model": config.model.model_dump(mode="json"),
        "tensors": len(headers),
        "parameters": sum(math.prod(header.shape) for header in headers.values()),
        "shards": len({header.file for header in headers.values()}),
        "overrides": [
            *overrides,
            *([f"data.tokenizer={out or folder}"] if tokenizer else []),
            f"run.weights={out or folder}",
        ],
    }


def _read_files(folder: Path, headers: Mapping[str, Header], draft: Path | None) -> None:
    """Read all weights to check them, and copy the files to `draft` if given. `headers` has an entry per tensor.

    Raises DataError if a value is NaN or infinite.
    """
    bad: list[str] = []
    by_file = sorted(headers.items(), key=lambda entry: entry[1].file)
    for file, entries in groupby(by_file, key=lambda entry: entry[1].file):
        if draft is not None:
            copy_file(folder / file, draft / file)
        bad += not_finite((draft or folder) / file, entries)  # the bytes of a copy are still in the page cache
    if bad:
        raise not_finite_error(bad, folder)
