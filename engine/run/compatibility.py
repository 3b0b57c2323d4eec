"""Resume compatibility: which values of a config a run must keep to resume from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.config.schema import Config
from engine.errors import CheckpointError
from engine.run.checkpoints import TrainState

_BIAS = "balance.bias_rate"


def must_match(config: Config) -> dict[str, Any]:
    """Return, by key, the values that a resumed run must keep: the tensors or the order of documents depend on them.

    Learning rates, batch and context sizes, planners and paths may change. Documents are compared by their fingerprint
    (`TrainState.fingerprint`), not by their path.
    """
    shape = config.model.model_dump(mode="json", exclude={"name"})
    # Expert biases are saved as multiples of this rate; without them there is no rate to keep.
    bias_rate = config.balance.bias_rate if config.balance.by == "bias" and config.model.experts > 1 else None
    # An optimizer on the host is another class with other states. Older checkpoints do not have the key.
    on_host = {"optimizer.on_host": True} if config.optimizer.on_host else {}
    return {f"model.{key}": value for key, value in shape.items()} | {
        _BIAS: bias_rate,
        "dtype": config.dtype,
        "optimizer.name": config.optimizer.name,
        "zero.stage": config.zero.stage,
        "run.seed": config.run.seed,
        "data.tokenizer": config.data.tokenizer,
        "data.validation_share": config.data.validation_share,
        **on_host,
    }


def check_compatible(checkpoint: Path, state: TrainState, config: Config, ranks: int) -> None:
    """Raise CheckpointError, with the differences, if this config on `ranks` ranks cannot resume from `state`."""
    before = _flat({"ranks": state.ranks, **state.must_match})
    now = _flat({"ranks": ranks, **must_match(config)})
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if not changed:
        return
    differences = [f"{key}: {_text(before.get(key))} -> {_text(now.get(key))}" for key in changed]
    if _BIAS in changed and None in (before.get(_BIAS), now.get(_BIAS)):
        # Only one of the two has biases at all, so the rate is not what the user changed. It is another key in the
        # list (the number of experts), or balance.by, which checkpoints do not store.
        del differences[changed.index(_BIAS)]
        by = "bias" if now.get(_BIAS) is None else "not bias"
        differences = differences or [f"balance.by: {by} -> {config.balance.by}"]
    message = f"this config cannot resume from the checkpoint: {'; '.join(differences)}"
    hint = "undo the change, or start a new run with another run.out and without --resume"
    raise CheckpointError(message, key=str(checkpoint), hint=hint)


def _text(value: Any) -> str:
    return "null" if value is None else str(value)


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten values that are mappings, such as rotary scaling, to one dotted key per entry."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= {f"{key}.{inner}": one for inner, one in value.items()} if isinstance(value, Mapping) else {key: value}
    return flat
