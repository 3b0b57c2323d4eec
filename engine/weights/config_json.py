"""config.json: their keys to those of `model`, and back. What our models cannot do is refused, not left out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.config.schema import Model
from engine.errors import DataError, Problem
from engine.weights.architectures import ARCHITECTURES, Architecture, architecture_of

CONFIG = "config.json"
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
    except (OSError, ValueError) as error:
        raise DataError("cannot be read as JSON", key=str(path), hint="copy it again from where it came") from error
    if not isinstance(values, dict):
        raise DataError("holds no JSON object", key=str(path), hint="copy it again from where it came")
    return values


def model_values(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the values of our `model.` keys, by their names ("heads", "rope.factor"), that a config.json stands for.

    Keys of a plain rotary embedding (`rope.`) are left out. Raises DataError with everything that our models cannot do.
    """
    known = _architecture(config, path)
    values = {"name": known.model_type, "experts": 1, "top_k": 1} | {
        ours: config.get(theirs) for ours, theirs in known.keys.items()
    }
    values["tied"] = bool(values["tied"])
    if values["kv_heads"] is None:
        values["kv_heads"] = values["heads"]
    problems = [
        Problem(f"{theirs} is missing", str(path), "copy it again from where it came")
        for ours, theirs in known.keys.items()
        if values[ours] is None
    ]
    problems += _strange(config, path)
    rope, bad = _rope(config, known, path)
    if problems or bad:
        raise DataError.of(problems + bad)
    return values | rope


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
    names = config.get("architectures") or [config.get("model_type")]
    for known in ARCHITECTURES:
        if names in ([known.name], [known.model_type]):
            return known
    told = "no architecture" if names == [None] else _text(names)
    hint = f"known: {', '.join(known.name for known in ARCHITECTURES)}"
    raise DataError(f"{told} is not a model that ByteScale has", key=str(path), hint=hint)


def _strange(config: Mapping[str, Any], path: Path) -> list[Problem]:
    """Return a problem for each value that makes it a model which ours is not."""
    only = dict(_ONLY)
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        only["head_dim"] = (hidden // heads, None)
    return [
        Problem(f"{key}={_text(config[key])} is not built, only {_text(allowed[0])}", str(path))
        for key, allowed in only.items()
        if key in config and config[key] not in allowed
    ]


def _rope(config: Mapping[str, Any], known: Architecture, path: Path) -> tuple[dict[str, Any], list[Problem]]:
    """Return the values of `rope_theta` and `rope.`; transformers 5 has one key, `rope_parameters`, for both."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        return {}, [Problem(f"{_text(given)} is no rotary scaling", str(path))]
    kind = given.get("rope_type") or given.get("type") or "default"
    theta = given.get("rope_theta") or config.get("rope_theta") or known.rope_theta
    values: dict[str, Any] = {"rope_theta": float(theta) if isinstance(theta, int) else theta}
    if kind == "default":
        return values, []
    if kind not in _KINDS:
        hint = f"known: default, {', '.join(_KINDS)}"
        return values, [Problem(f"rotary scaling {kind} is not built", str(path), hint)]
    strange = [key for key in given if key not in _ROPE + _IGNORED]
    if strange:
        return values, [Problem(f"rotary scaling {kind} with {strange[0]} is not built", str(path))]
    scaling = {f"rope.{key}": given[key] for key in _ROPE if given.get(key) is not None}
    return values | {"rope.kind": kind} | scaling, []


def _rope_scaling(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    if rope.get("kind", "none") == "none":
        return None
    return {"rope_type": rope["kind"]} | {key: rope[key] for key in _ROPE if rope.get(key) is not None}


def _text(value: object) -> str:
    """Return a value as config.json has it."""
    return json.dumps(value)
