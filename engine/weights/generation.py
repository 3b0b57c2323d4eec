"""generation_config.json: with which tokens transformers ends a text, and its other defaults for generation.

The tokens are those of the weights that a run begins with, EOS of the documents, and the one with which the chat
template ends a turn: without it, the answers of a model that was trained on chats would never end.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.data.tokenizers.load import IN_FOLDER
from engine.errors import DataError
from engine.readers import read_object
from engine.weights.config_json import CONFIG, FIX

GENERATION = "generation_config.json"
_EOS, _BOS = "eos_token_id", "bos_token_id"


def read_generation(folder: Path, eos: int | None = None) -> dict[str, Any]:
    """Read the generation_config.json of a Hugging Face folder, or what transformers takes from its config.json.

    Empty if the folder has no tokenizer, and `eos`, that of the tokenizer in use, does not end its texts: the meaning
    of its ids is then unknown. Raises DataError if the file cannot be used.
    """
    path = folder / (GENERATION if (folder / GENERATION).exists() else CONFIG)
    found = read_object(path, hint=FIX) if path.exists() else {}
    if path.name == CONFIG:
        found = {key: found[key] for key in (_BOS, _EOS, "pad_token_id") if found.get(key) is not None}
    stops = _listed(found.get(_EOS))
    if not all(type(token) is int and token >= 0 for token in stops):
        raise DataError(f"{_EOS} must be a token id or a list of them", key=str(path), hint=FIX)
    return found if eos in stops or any((folder / name).is_file() for name in IN_FOLDER) else {}


def stop_tokens(facts: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end a text of a run's model, by the run's summary.json: each once."""
    others = (facts.get("eos"), facts.get("end_of_turn"))
    every = [*_listed(facts.get("generation", {}).get(_EOS)), *(token for token in others if token is not None)]
    return list(dict.fromkeys(every))


def generation_config(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of generation_config.json for the model of a run, by the run's summary.json."""
    stops, bos = stop_tokens(facts), facts.get("bos")
    ends = {_EOS: stops[0] if len(stops) == 1 else stops} if stops else {}
    return {**facts.get("generation", {}), **({} if bos is None else {_BOS: bos}), **ends}


def _listed(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]
