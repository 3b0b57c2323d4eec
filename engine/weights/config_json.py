"""Translates config.json to the keys of `model`, and back. Values that our models do not support are rejected."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

from engine.config.explain.hub import no_model
from engine.config.schema import Model
from engine.errors import DataError, Problem
from engine.family.families import FAMILIES, family_of
from engine.family.family import Family
from engine.readers import read_object

CONFIG = "config.json"
_COPY_AGAIN = "copy it again from its source"
FIX = f"correct it, or {_COPY_AGAIN}"
_OPTIONAL = ("kv_heads", "tied", "norm_top_k")  # may be missing; then kv_heads is heads, and the others are false
_TYPES: dict[Any, tuple[tuple[type[Any], ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number above 0"),
    float: ((int, float), "a number above 0"),
}
# Keys that change the model in any family, and their values that our models support. They may be missing.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "sliding_window": (None,),
    "quantization_config": (None,),
    "partial_rotary_factor": (1, None),
}
_ROPE_KINDS = ("linear", "yarn", "llama3")
_ROPE_KEYS = (
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
)


def read_config(folder: Path, place: str | None = None) -> dict[str, Any]:
    """Read the config.json of a folder. Raises DataError if it is missing or not a JSON object.

    `place` is how errors name the folder, by default its path.
    """
    path, place = folder / CONFIG, place or str(folder)
    if not folder.is_dir():
        raise no_model(str(folder), place)
    try:
        return read_object(path, hint=_COPY_AGAIN)
    except FileNotFoundError:
        hint = "choose a complete Hugging Face folder; a folder that is still being written has no config.json"
        raise DataError(f"has no {CONFIG}", key=place, hint=hint) from None
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", key=str(path), hint=_COPY_AGAIN) from error


def model_values(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Translate the values of a config.json to our keys, without the prefix `model.` ("heads", "rope.factor").

    `path` is the file, for messages. Without rotary scaling the result has no `rope.` keys. Raises DataError that lists
    all values that are invalid, or that our models do not support.
    """
    # The family decides the names of all other keys.
    key = "architectures" if config.get("architectures") else "model_type"
    name = config.get(key)
    known = next((one for one in FAMILIES.values() if name in ([one.architecture], one.name)), None)
    if known is None:
        message = "architectures is missing" if name is None else f"{key}={json.dumps(name)} is not supported"
        hint = f"supported: {', '.join(json.dumps([one.architecture]) for one in FAMILIES.values())}"
        raise DataError(message, key=str(path), hint=hint)
    if config.get("model_type") not in (None, known.name):  # by which transformers chooses
        message = (
            f"architectures is {json.dumps([known.architecture])}, but model_type {json.dumps(config['model_type'])}"
        )
        raise DataError(message, key=str(path), hint=FIX)
    # Under a second name a value counts if the first is missing.
    given = {**{first: config[second] for first, second in known.spellings.items() if second in config}, **config}
    plain = {"name": known.name, "family": known.name, "head_size": None, "experts": 1, "top_k": 1, "norm_top_k": True}
    values: dict[str, Any] = plain | {ours: given.get(theirs) for ours, theirs in known.keys.items()}
    problems: list[Problem] = []
    for ours, theirs in known.keys.items():
        if values[ours] is not None:
            problems += _wrong_type(theirs, values[ours], Model.model_fields[ours].annotation, path)
        elif ours not in _OPTIONAL:
            problems.append(Problem(f"{theirs} is missing", str(path), FIX))
    problems += _unsupported(config, known, path)
    rope, wrong = _rope_values(config, known, path)
    problems += wrong
    head_dim = known.head_size if config.get("head_dim") is None else config["head_dim"]
    if head_dim is not None:
        problems += _wrong_type("head_dim", head_dim, int, path)
    if problems:
        raise DataError.of(problems)
    # `head_size` stays null if the heads divide the width, as in recipes.
    if head_dim is not None and head_dim * values["heads"] != values["hidden"]:
        values["head_size"] = head_dim
    if values["kv_heads"] is None:
        values["kv_heads"] = values["heads"]
    return values | {key: bool(values[key]) for key in ("tied", "norm_top_k")} | rope


def with_their_keys(text: str) -> str:
    """Replace our config keys in a text by those of config.json, for example model.heads by num_attention_heads."""
    names = {ours: theirs for known in FAMILIES.values() for ours, theirs in known.keys.items()}
    names |= {"kind": "rope_type", "head_size": "head_dim"}
    return re.sub(r"\bmodel\.(?:rope\.)?(\w+)", lambda found: names.get(found[1], found[1]), text)


def config_json(shape: Model, context: int, dtype: str, bos: int | None, eos: int | list[int] | None) -> dict[str, Any]:
    """Return the content of config.json for a model.

    `context` is the longest context in training, `dtype` PyTorch's name of the stored dtype (bfloat16), `bos` and `eos`
    are token numbers.
    """
    known, values = family_of(shape), shape.model_dump(mode="json")
    rope = values.get("rope", {})
    scaling = None
    if rope.get("kind", "none") != "none":
        scaling = {"rope_type": rope["kind"]} | {key: rope[key] for key in _ROPE_KEYS if rope.get(key) is not None}
    return {
        "architectures": [known.architecture],
        "model_type": known.name,
        **{theirs: values[ours] for ours, theirs in known.keys.items()},
        "head_dim": shape.head_dim,
        **known.fixed,
        "max_position_embeddings": context,
        "rope_theta": shape.rope_theta,
        "rope_scaling": scaling,
        "torch_dtype": dtype,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "use_cache": True,
    }


def override_value(value: object) -> str:
    """Format a value as in a command-line override: null, true, 3."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _unsupported(config: Mapping[str, Any], known: Family, path: Path) -> Iterator[Problem]:
    """Yield a problem for each value that our models do not support, of keys for which they have no setting."""
    # Null says the same as false, and as no layers.
    supported = _SUPPORTED | {key: (value,) if value else (value, None) for key, value in known.fixed.items()}
    if "use_sliding_window" in known.fixed:
        del supported["sliding_window"]  # without effect
    hint = "use weights of a model with the supported value"
    for theirs, allowed in supported.items():
        if theirs in config and config[theirs] not in allowed:
            message = f"{theirs}={json.dumps(config[theirs])} is not supported, only {json.dumps(allowed[0])}"
            yield Problem(message, str(path), hint)
    kinds = config.get("layer_types") or []
    others = [kind for kind in kinds if kind != "full_attention"] if isinstance(kinds, list) else [kinds]
    if others:
        yield Problem(
            f'layer_types with {json.dumps(others[0])} is not supported, only "full_attention"', str(path), hint
        )
    for first, second in known.spellings.items():
        if first in config and second in config and config[first] != config[second]:
            message = f"{first} and {second} differ: {json.dumps(config[first])} and {json.dumps(config[second])}"
            yield Problem(message, str(path), FIX)


def _wrong_type(key: str, value: Any, kind: Any, path: Path) -> Iterator[Problem]:
    """Yield a problem if a value is not of type `kind`: a bool, or an int or float above 0 and finite.

    `key` and `path` are the key in config.json and its file, for the message.
    """
    types, wanted = _TYPES[kind]
    # type() and not isinstance(): in Python, true is an int.
    if type(value) not in types or not (kind is bool or 0 < value < math.inf):
        yield Problem(f"{key} must be {wanted}, not {json.dumps(value)}", str(path), FIX)


def _rope_values(config: Mapping[str, Any], known: Family, path: Path) -> tuple[dict[str, Any], list[Problem]]:
    """Return the values of our keys `rope_theta` and `rope.*`, and the problems with them."""
    # transformers 5 has one key, `rope_parameters`. Earlier versions have two, `rope_scaling` and `rope_theta`.
    both = {key: config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key)}
    for one in both.values():
        if not isinstance(one, dict):
            return {}, [Problem(f"the rotary scaling must be a JSON object, not {json.dumps(one)}", str(path), FIX)]
    beside = config.get("rope_theta")
    meanings = {key: _rope_meaning(one, known.rope_theta if beside is None else beside) for key, one in both.items()}
    if beside is not None:
        meanings["rope_theta"] = {"rope_theta": beside}
    if problem := _differ(meanings, path):
        return {}, [problem]
    given: Mapping[str, Any] = next(iter(both.values()), {})
    kind, theta = _rope_kind(given), next((one["rope_theta"] for one in meanings.values()), known.rope_theta)
    values: dict[str, Any] = {"rope_theta": float(theta) if isinstance(theta, int) else theta}
    problems = [*_wrong_type("rope_theta", theta, float, path)]
    if kind == "default":
        return values, problems
    if kind not in _ROPE_KINDS:
        hint = f"supported: default, {', '.join(_ROPE_KINDS)}"
        return values, [*problems, Problem(f"rope_type={json.dumps(kind)} is not supported", str(path), hint)]
    unknown = [key for key in given if key not in (*_ROPE_KEYS, "rope_type", "type", "rope_theta")]
    if unknown:
        message = f"rotary scaling {kind} with {unknown[0]} is not supported"
        return values, [*problems, Problem(message, str(path), "use weights of a model without it")]
    scaling = {key: given[key] for key in _ROPE_KEYS if given.get(key) is not None}
    problems += [problem for key, value in scaling.items() for problem in _wrong_type(key, value, float, path)]
    return values | {"rope.kind": kind} | {f"rope.{key}": value for key, value in scaling.items()}, problems


def _rope_kind(given: Mapping[str, Any]) -> Any:
    """Return the kind of rotary scaling in an object of config.json."""
    return given.get("rope_type") or given.get("type") or "default"


def _rope_meaning(given: Mapping[str, Any], theta: Any) -> dict[str, Any]:
    """Return what an object of config.json says about the rotary embedding, in one spelling.

    `theta` is the base if the object has none. `default` has no parameters but this.
    """
    kind, names = _rope_kind(given), ("rope_type", "type", "rope_theta")
    scaling = {key: value for key, value in given.items() if key not in names and value is not None}
    base = given.get("rope_theta")
    meaning = {"rope_type": kind, "rope_theta": theta if base is None else base}
    return meaning | ({} if kind == "default" else scaling)


def _differ(meanings: Mapping[str, Mapping[str, Any]], path: Path) -> Problem | None:
    """Return the problem if keys of config.json say the same things differently: `meanings` by key. Else None.

    Programs take different ones: transformers 5 takes rope_scaling, and a base inside it before one beside it.
    """
    for (one, first), (other, second) in combinations(meanings.items(), 2):
        # `rope_theta` says nothing about the others.
        said = set(first) & set(second) if "rope_theta" in (one, other) else {*first, *second}
        for key in sorted(said):
            if first.get(key) != second.get(key):
                message = (
                    f"{one} and {other} differ: {key} is {json.dumps(first.get(key))} and {json.dumps(second.get(key))}"
                )
                return Problem(message, str(path), "remove the one that is not meant; transformers uses rope_scaling")
    return None
