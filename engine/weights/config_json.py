"""config.json: their keys to those of `model`, and back. What our models cannot do is refused, not left out."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine.config.schema import Model
from engine.data.tokenizer import VOCAB
from engine.errors import DataError, Problem
from engine.weights.architectures import ARCHITECTURES, Architecture, architecture_of

CONFIG = "config.json"
_AGAIN = "copy it again from where it came"
MEND = f"mend it, or {_AGAIN}"
_OTHER = "take weights of a model that has it so"
_OPTIONAL = ("kv_heads", "tied")  # old files leave them out
_WANTED: dict[Any, tuple[tuple[type[Any], ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number above 0"),
    float: ((int, float), "a number above 0"),
}
# What must have one of these values if it is there: everything else would be another model.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "sliding_window": (None,),
    "quantization_config": (None,),
    "partial_rotary_factor": (1, None),
}
_ROPE = (
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
_KINDS = ("linear", "yarn", "llama3")
_IGNORED = ("rope_type", "type", "rope_theta")


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a folder. Raises DataError if there is none or it is no JSON object."""
    path = folder / CONFIG
    if not folder.is_dir():
        raise DataError("is not a folder", key=str(folder), hint="name a folder with config.json and safetensors files")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = "name a whole Hugging Face folder: one that is still being written has no config.json"
        raise DataError(f"there is no {CONFIG}", key=str(folder), hint=hint) from None
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", key=str(path), hint=_AGAIN) from error
    except ValueError as error:
        raise DataError("cannot be read as JSON", key=str(path), hint=_AGAIN) from error
    if not isinstance(values, dict):
        raise DataError("holds no JSON object", key=str(path), hint=_AGAIN)
    return values


def model_values(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the values of our `model.` keys, by their names ("heads", "rope.factor"), that a config.json stands for.

    Keys of a plain rotary embedding (`rope.`) are left out. Raises DataError with all that is no value, and with
    everything that our models, or our tokenizer, cannot do.
    """
    known = _architecture(config, path)
    values = {"name": known.model_type, "experts": 1, "top_k": 1} | {
        ours: config.get(theirs) for ours, theirs in known.keys.items()
    }
    rope, problems = _rope(config, known, path)
    problems = [*_unsound(values, known, path), *_strange(config, path), *problems]
    if problems:
        raise DataError.of(problems)
    if values["kv_heads"] is None:
        values["kv_heads"] = values["heads"]
    return values | {"tied": bool(values["tied"])} | rope


def in_their_words(text: str) -> str:
    """Return a text about our keys as one about those of config.json: num_attention_heads for model.heads."""
    names = {ours: theirs for known in ARCHITECTURES for ours, theirs in known.keys.items()} | {"kind": "rope_type"}
    return re.sub(r"\bmodel\.(?:rope\.)?(\w+)", lambda found: names.get(found[1], found[1]), text)


def config_json(shape: Model, context: int, dtype: str, bos: int, eos: int) -> dict[str, Any]:
    """Return the config.json of a model that was trained on contexts up to `context`, in `dtype` (bfloat16, ...)."""
    known, values = architecture_of(shape), shape.model_dump(mode="json")
    return {
        "architectures": [known.name],
        "model_type": known.model_type,
        **{theirs: values[ours] for ours, theirs in known.keys.items()},
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": context,
        "rope_theta": shape.rope_theta,
        "rope_scaling": _rope_scaling(values.get("rope", {})),
        "torch_dtype": dtype,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "use_cache": True,
    }


def word(value: object) -> str:
    """Return a value as an override has it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _architecture(config: Mapping[str, Any], path: Path) -> Architecture:
    key = "architectures" if config.get("architectures") else "model_type"
    name = config.get(key)
    for known in ARCHITECTURES:
        if name in ([known.name], known.model_type):
            return known
    hint = f"known: {', '.join(_text([known.name]) for known in ARCHITECTURES)}"
    told = "architectures is missing" if name is None else f"{key}={_text(name)} is not a model that ByteScale has"
    raise DataError(told, key=str(path), hint=hint)


def _unsound(values: Mapping[str, Any], known: Architecture, path: Path) -> Iterator[Problem]:
    """Yield what is wrong with each value by itself."""
    for ours, theirs in known.keys.items():
        value, kind = values[ours], Model.model_fields[ours].annotation
        if value is None and ours not in _OPTIONAL:
            yield Problem(f"{theirs} is missing", str(path), MEND)
        elif value is not None:
            yield from _mistyped(theirs, value, kind, path)
    if isinstance(values["vocab"], int) and 0 < values["vocab"] < VOCAB:
        message = f"vocab_size={values['vocab']} is less than the byte tokenizer's {VOCAB}, and there is no other"
        yield Problem(message, str(path), f"take weights with a vocabulary of {VOCAB} or more")


def _mistyped(key: str, value: Any, kind: Any, path: Path) -> Iterator[Problem]:
    """Yield that a value is no bool, no int or no float, or a number that is no size; true is no number."""
    types, wanted = _WANTED[kind]
    if type(value) not in types or not (kind is bool or 0 < value < math.inf):
        yield Problem(f"{key} must be {wanted}, not {_text(value)}", str(path), MEND)


def _strange(config: Mapping[str, Any], path: Path) -> list[Problem]:
    """Return a problem for each value that makes it a model which ours is not."""
    only = dict(_ONLY)
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if type(hidden) is type(heads) is int and min(hidden, heads) > 0 and hidden % heads == 0:
        only["head_dim"] = (hidden // heads, None)
    return [
        Problem(f"{key}={_text(config[key])} is not built, only {_text(allowed[0])}", str(path), _OTHER)
        for key, allowed in only.items()
        if key in config and config[key] not in allowed
    ]


def _rope(config: Mapping[str, Any], known: Architecture, path: Path) -> tuple[dict[str, Any], list[Problem]]:
    """Return the values of `rope_theta` and `rope.`; transformers 5 has one key, `rope_parameters`, for both."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        return {}, [Problem(f"{_text(given)} is no rotary scaling", str(path), MEND)]
    kind = given.get("rope_type") or given.get("type") or "default"
    thetas = [where["rope_theta"] for where in (given, config) if where.get("rope_theta") is not None]
    theta = [*thetas, known.rope_theta][0]
    values: dict[str, Any] = {"rope_theta": float(theta) if isinstance(theta, int) else theta}
    problems = [*_mistyped("rope_theta", theta, float, path)]
    if kind == "default":
        return values, problems
    if kind not in _KINDS:
        hint = f"known: default, {', '.join(_KINDS)}"
        return values, [*problems, Problem(f"rope_type={_text(kind)} is not built", str(path), hint)]
    strange = [key for key in given if key not in _ROPE + _IGNORED]
    if strange:
        told = f"rotary scaling {kind} with {strange[0]} is not built"
        return values, [*problems, Problem(told, str(path), "take weights of a model without it")]
    scaling = {key: given[key] for key in _ROPE if given.get(key) is not None}
    problems += [problem for key, value in scaling.items() for problem in _mistyped(key, value, float, path)]
    return values | {"rope.kind": kind} | {f"rope.{key}": value for key, value in scaling.items()}, problems


def _rope_scaling(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    if rope.get("kind", "none") == "none":
        return None
    return {"rope_type": rope["kind"]} | {key: rope[key] for key in _ROPE if rope.get(key) is not None}


def _text(value: object) -> str:
    """Return a value as config.json has it."""
    return json.dumps(value)
