"""What a checkpoint belongs to: it goes on only with the ranks, the model and the order of documents that made it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.config.schema import Config
from engine.errors import CheckpointError
from engine.trainer.checkpoint import TrainState

_BIAS = "balance.bias_rate"


def lineage(config: Config) -> dict[str, Any]:
    """Return the values, by their keys, that a run must keep to go on from its checkpoints.

    The tensors depend on them, or the place in the order of documents does. The documents have a fingerprint of their
    own, wherever they lie; rates, batches, context and plans may change.
    """
    shape = config.model.model_dump(mode="json", exclude={"name"})
    # Biases are saved as steps of this rate; a model that is balanced in another way has none.
    bias_rate = config.balance.bias_rate if config.balance.by == "bias" and config.model.experts > 1 else None
    host = {"optimizer.on_host": True} if config.optimizer.on_host else {}  # another class, whose states differ
    return {f"model.{key}": value for key, value in shape.items()} | {
        _BIAS: bias_rate,
        "dtype": config.dtype,
        "optimizer.name": config.optimizer.name,
        "zero.stage": config.zero.stage,
        "run.seed": config.run.seed,
        "data.tokenizer": config.data.tokenizer,
        "data.validation_share": config.data.validation_share,
        **host,
    }


def check_lineage(checkpoint: Path, state: TrainState, config: Config, ranks: int) -> None:
    """Raise CheckpointError, with the differences, unless `ranks` ranks of this config can go on from a checkpoint."""
    before, now = {"ranks": state.ranks, **state.lineage}, {"ranks": ranks, **lineage(config)}
    changes = _changes(_flat(before), _flat(now), config.balance.by)
    if changes:
        hint = "take the change back, or start a new run with another run.out and without --resume"
        message = f"this checkpoint is of another run: {'; '.join(changes)}"
        raise CheckpointError(message, key=str(checkpoint), hint=hint)


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], balance: str) -> list[str]:
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if _BIAS in keys and None in (before.get(_BIAS), now.get(_BIAS)):
        unbalanced = {_BIAS: None}
        return _changes({**before, **unbalanced}, {**now, **unbalanced}, balance) or [_balance(before, balance)]
    return [f"{key}: {_word(before.get(key))} -> {_word(now.get(key))}" for key in keys]


def _balance(before: Mapping[str, Any], balance: str) -> str:
    """Return what a rate of biases that is there only before, or only now, stands for."""
    return f"balance.by: {'another' if before.get(_BIAS) is None else 'bias'} -> {balance}"


def _word(value: Any) -> str:
    return "null" if value is None else str(value)


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by their whole keys: rotary scaling is kept as one."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= {f"{key}.{inner}": one for inner, one in value.items()} if isinstance(value, Mapping) else {key: value}
    return flat
