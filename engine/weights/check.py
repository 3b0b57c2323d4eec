"""Checks whether the weights of a folder fit a model: first its config.json, then the headers of its tensors.

config.json is needed because some values, such as the number of heads, do not follow from tensor shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import nn

from engine.config.schema import Config, Model
from engine.errors import Problem
from engine.family.families import parameters_of, stored_names
from engine.family.parameters import HEAD
from engine.models.build import build_model
from engine.weights.config_json import CONFIG, model_values, override_value, read_config
from engine.weights.finite import STORED
from engine.weights.folder import COPY_AGAIN, Header, error_of, read_headers

_EMBEDDING, _HEAD = "embedding.weight", "lm_head.weight"
# Tensors in some files that are not loaded: angles are computed, and a tied head is the embedding.
_UNUSED = ("rotary_emb.inv_freq", _HEAD)


def check_weights(folder: Path, config: Config) -> list[str]:
    """Check that the weights of a Hugging Face folder fit the model of a config.

    Settings of the rotary embedding may differ, because training for longer contexts changes them: returns one line
    for each that differs. Reads config.json and the headers of the files, not the tensors, except for the head of a
    tied model. Raises DataError if the folder is incomplete, or with the first ten mismatches and the number of others.
    """
    theirs = {"rope.kind": "none"} | model_values(read_config(folder, f"run.weights={folder}"), folder / CONFIG)
    ours = config.model.model_dump(mode="json")
    ours |= {f"rope.{key}": value for key, value in ours.pop("rope").items()}
    headers = read_headers(folder)
    problems = []
    for key, value in theirs.items():
        if ours.get(key) != value and key != "name" and not key.startswith("rope"):
            message = f"is {override_value(ours.get(key))}, but the weights have {override_value(value)}"
            problems.append(Problem(message, f"model.{key}", f"set model.{key}={override_value(value)}"))
    # If config.json fits the model but tensors do not, config.json does not belong to these files.
    hint = None if problems else f"{CONFIG} and the files are not from the same model: {COPY_AGAIN}"
    problems += _mismatches(headers, config, folder, hint)
    if not problems and config.model.tied and _HEAD in headers:
        problems += _check_tied_head(headers, config.model, folder)
    if problems:
        raise error_of(problems, "tensors that do not fit")
    return [
        f"the weights were made with model.{key}={override_value(theirs.get(key))}; "
        f"this run has {override_value(ours.get(key))}"
        for key in {**ours, **theirs}
        if key.startswith("rope") and ours.get(key) != theirs.get(key)
    ]


def expected_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that the model of a config needs, by Hugging Face's names."""
    with torch.device("meta"):
        model = build_model(config)
    return {name: tuple(place.tensor.shape) for name, place in places(model, config.model).items()}


class Place(NamedTuple):
    """Where our model stores a Hugging Face tensor: in a parameter, or as one expert's entry of a stacked parameter."""

    name: str
    parameter: nn.Parameter
    expert: int | None
    split: int | None  # the dim of the tensor that tensor parallelism splits

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor to fill. Under ZeRO-3 it is valid only while the parameter is gathered."""
        return self.parameter if self.expert is None else self.parameter[self.expert]


def places(model: nn.Module, shape: Model) -> dict[str, Place]:
    """Return, for each of Hugging Face's tensor names, where it is stored in our model, or in a part of it.

    A part with the head but without the embedding has its own copy of a tied weight.
    """
    names, table, found, part = stored_names(shape), parameters_of(shape), {}, getattr(model, "part", None)
    for ours, parameter in model.named_parameters():
        theirs = names[_EMBEDDING if shape.tied and ours == HEAD else ours]
        split, stacked, first, count = table[ours].split, table[ours].stacked, 0, len(theirs)
        if stacked:
            split = None if split is None else split - 1  # the experts are stacked in dim 0
            count //= part.ep if part is not None else 1
            first = part.ep_rank * count if part is not None else 0
        for place, name in enumerate(theirs[first : first + count]):
            found[name] = Place(ours, parameter, place if stacked else None, split)
    return found


def _mismatches(headers: Mapping[str, Header], config: Config, folder: Path, hint: str | None) -> list[Problem]:
    """Return a problem for each tensor that is missing, unknown, or of a wrong shape or an unsupported dtype."""
    key = str(folder)
    if config.model.layers > len(headers):  # listing the missing tensors of a million layers would take minutes
        return [Problem(f"has fewer tensors than the model has layers (model.layers={config.model.layers})", key, hint)]
    needed, problems = expected_shapes(config), []
    for name, shape in needed.items():
        if name not in headers:
            problems.append(Problem(f"{name} is missing: the model needs shape {list(shape)}", key, hint))
        elif headers[name].shape != shape:
            message = f"{name} has shape {list(headers[name].shape)}, but the model needs {list(shape)}"
            problems.append(Problem(message, key, hint))
        elif headers[name].dtype not in STORED:
            message = f"{name} is stored as {headers[name].dtype}, which is not one of {', '.join(STORED)}"
            problems.append(Problem(message, key, "save it as one of these, for example with model.bfloat16()"))
    unknown = [name for name in sorted(headers.keys() - needed.keys()) if not name.endswith(_UNUSED)]
    return problems + [Problem(f"{name} does not belong to the model", key, hint) for name in unknown]


def _check_tied_head(headers: Mapping[str, Header], shape: Model, folder: Path) -> list[Problem]:
    """Return a problem if the head in the files of a tied model differs from the embedding."""
    if headers[_HEAD].dtype not in STORED:
        message = f"{_HEAD} is stored as {headers[_HEAD].dtype}, unlike the embedding that it is tied to"
        return [Problem(message, str(folder), f"remove {_HEAD}, or save it with the dtype of the embedding")]
    tensors = []
    for name in (_HEAD, stored_names(shape)[_EMBEDDING][0]):
        with safe_open(folder / headers[name].file, framework="pt") as shard:
            tensors.append(shard.get_tensor(name).nan_to_num())  # NaN is unequal to NaN, and is reported elsewhere
    if torch.equal(*tensors):
        return []
    hint = f"set model.tied=false, and tie_word_embeddings in {CONFIG}"
    return [Problem(f"{_HEAD} differs from the embedding, although they are tied", str(folder), hint)]
