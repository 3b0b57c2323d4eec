"""Whether weights fit a model: its keys first, since heads do not show in a shape, then every tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import nn

from engine.config.schema import Config, Model
from engine.errors import Problem
from engine.models.build import build_model
from engine.weights.architectures import tensor_names
from engine.weights.config_json import CONFIG, model_values, read_config, word
from engine.weights.finite import STORED
from engine.weights.folder import WAY_OUT, Header, read_headers, told

_FREE = ("name", "rope_theta")  # longer contexts want other angles than the weights were trained with
_EMBEDDING, _HEAD = "embedding.weight", "lm_head.weight"
_UNUSED = ("rotary_emb.inv_freq", _HEAD)  # computed here; or the embedding's, where it is tied


def check_weights(folder: Path, config: Config) -> list[str]:
    """Check that a folder's weights fit a config's model; return what differs and may: the rotary angles, a line each.

    Reads config.json and the headers of the files, not the tensors. Raises DataError: of a folder that is not whole,
    or with the mismatches, ten at most, and how many more there are.
    """
    values = {"rope.kind": "none"} | model_values(read_config(folder), folder / CONFIG)
    ours = _flat(config.model.model_dump(mode="json"))
    headers = read_headers(folder)
    keys = [*_keys(ours, values)]
    way_out = None if keys else f"{CONFIG} and the files are not of one model: {WAY_OUT}"
    problems = [*keys, *_tensors(headers, config, folder, way_out)] or [*_heads(headers, config, folder)]
    if problems:
        raise told(problems, "tensors that do not fit")
    return [
        f"the weights were made with model.{key}={word(values.get(key))}; here it is {word(ours.get(key))}"
        for key in _rope(ours, values)
    ]


def expected_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor, under their names, that a config's model needs."""
    with torch.device("meta"):
        model = build_model(config)
    return {name: tuple(place.tensor.shape) for name, place in places(model, config.model).items()}


class Place(NamedTuple):
    """Where one of their tensors lies in a model: a parameter, or one expert's entry of a stacked one."""

    parameter: nn.Parameter
    expert: int | None

    @property
    def tensor(self) -> torch.Tensor:
        """Return what is to be filled; under ZeRO-3 only while the parameter is gathered."""
        return self.parameter if self.expert is None else self.parameter[self.expert]


def places(model: nn.Module, shape: Model) -> dict[str, Place]:
    """Return the place of each of their tensors in a model."""
    parameters, names = dict(model.named_parameters()), tensor_names(shape)
    assert parameters.keys() == names.keys(), "the table of names is not this model's"
    return {
        name: Place(parameters[ours], expert if len(theirs) > 1 else None)
        for ours, theirs in names.items()
        for expert, name in enumerate(theirs)
    }


def _keys(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[Problem]:
    for key, value in theirs.items():
        if ours.get(key) != value and key not in _FREE and not key.startswith("rope."):
            message = f"is {word(ours.get(key))}, but the weights have {word(value)}"
            yield Problem(message, f"model.{key}", f"set model.{key}={word(value)}")


def _rope(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return the keys of the rotary angles that differ."""
    return [key for key in {**ours, **theirs} if key.startswith("rope") and ours.get(key) != theirs.get(key)]


def _tensors(headers: Mapping[str, Header], config: Config, folder: Path, way_out: str | None) -> Iterator[Problem]:
    place = str(folder)
    if config.model.layers > len(headers):  # nobody waits for a list of all that a million layers would need
        yield Problem(f"has fewer tensors than model.layers={config.model.layers}", place, way_out)
        return
    needed = expected_shapes(config)
    for name, size in needed.items():
        if name not in headers:
            yield Problem(f"{name} is missing: the model needs {list(size)}", place, way_out)
        elif headers[name].shape != size:
            yield Problem(f"{name} is {list(headers[name].shape)}, but the model needs {list(size)}", place, way_out)
        elif headers[name].dtype not in STORED:
            told = f"{name} is stored as {headers[name].dtype}, not as one of {', '.join(STORED)}"
            yield Problem(told, place, "save it in one of them, for example with model.bfloat16()")
    for name in sorted(headers.keys() - needed.keys()):
        if not name.endswith(_UNUSED):
            yield Problem(f"{name} has no place in the model", place, way_out)


def _heads(headers: Mapping[str, Header], config: Config, folder: Path) -> Iterator[Problem]:
    """A head beside tied embeddings is their copy, or the weights are another model's."""
    if not (config.model.tied and _HEAD in headers):
        return
    if headers[_HEAD].dtype not in STORED:
        hint = f"leave {_HEAD} out, or save it as the embedding is"
        yield Problem(f"{_HEAD} is stored as {headers[_HEAD].dtype}, and the embedding is not", str(folder), hint)
        return
    head, embedding = (_tensor(folder, headers, name) for name in (_HEAD, tensor_names(config.model)[_EMBEDDING][0]))
    if not torch.equal(head.nan_to_num(), embedding.nan_to_num()):  # NaN is no reason to speak of ties
        hint = f"set model.tied=false, and tie_word_embeddings in {CONFIG}"
        yield Problem(f"{_HEAD} is not the embedding, though they are tied", str(folder), hint)


def _tensor(folder: Path, headers: Mapping[str, Header], name: str) -> torch.Tensor:
    with safe_open(folder / headers[name].file, framework="pt") as shard:
        found: torch.Tensor = shard.get_tensor(name)
    return found


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    rope = values.get("rope", {})
    return {key: value for key, value in values.items() if key != "rope"} | {f"rope.{k}": v for k, v in rope.items()}
