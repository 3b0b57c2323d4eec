"""Resume compatibility: which values of a config a run must keep to resume, and which may change in its own folder."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from engine.config import versions
from engine.config.schema import Config
from engine.config.sources import ONLY
from engine.errors import CheckpointError, DataError
from engine.family.families import family_of
from engine.readers import read_object
from engine.run.checkpoints import START_OVER, TrainState
from engine.run.folder import RunFolder

_BIAS = "balance.bias_rate"
_TOKENIZER = "data.tokenizer"

# Older checkpoints have these keys too. Their values may change: see engine/zero/reshard.py.
_NO_LONGER = frozenset({"zero.stage", "optimizer.on_host"})

# Keys that may change in a run's own folder. They decide where and how a step is computed, what is written when, and
# how long the run is. The result of a step stays the same (Note: [plan invariance] in docs/design.md), except that the
# schedule of the learning rate spans run.steps. Documents that are left out do change results, but without a checkpoint
# there is no result yet, and with one, their fingerprints are compared.
_SAME_RUN = (
    *("recipe", "capacity", "recompute", "mlp_tile", "compile", "model.name", "optimizer.on_host"),
    *("cluster.*", "parallel.*", "planner.*", "zero.*", "offload.*", "lengths.*", "slurm.*", "k8s.*"),
    *("data.cache", "data.spool", "data.loaders", "data.quarantine_after", "data.runtime", "data.ray.*"),
    *("run.out", "run.steps", "run.validate_every", "run.checkpoint_every", "run.restarts", "run.trackers"),
    *("run.keep_checkpoints", "run.keep_every", "run.keep_best", "run.remote"),
    *("run.on_nan", "run.max_skips", "run.notice_file", "run.chaos"),
)


def same_run(key: str, has_checkpoint: bool) -> bool:
    """Return whether a run continues in its own folder when the value of `key` changes.

    With a checkpoint this includes keys of the data: the documents are compared by their fingerprint later.
    """
    free = (*_SAME_RUN, "data.*") if has_checkpoint else _SAME_RUN
    return any(fnmatchcase(key, pattern) for pattern in free)


def must_match(config: Config) -> dict[str, Any]:
    """Return, by key, the values that a resumed run must keep: the tensors or the order of documents depend on them.

    Learning rates, batch and context sizes, planners, ranks, ZeRO stages and paths may change. Documents and their
    tokenizer are compared by fingerprints (`TrainState.fingerprints`, `TrainState.tokenizer`), not by paths.
    """
    shape = config.model.model_dump(mode="json", exclude={"name"})
    # Expert biases are saved as multiples of this rate; without them there is no rate to keep.
    bias_rate = config.balance.bias_rate if config.balance.by == "bias" and family_of(config.model).experts else None
    return {f"model.{key}": value for key, value in shape.items()} | {
        _BIAS: bias_rate,
        "dtype": config.dtype,
        "optimizer.name": config.optimizer.name,
        "run.seed": config.run.seed,
        "data.validation_share": config.data.validation_share,
    }


def check_compatible(
    checkpoint: Path | str, state: TrainState, config: Config, tokenizer: Mapping[str, Any] | None = None
) -> None:
    """Raise CheckpointError, with the differences, if this config cannot resume from `state`.

    `tokenizer` is what `tokenizer_facts` returns for the config. If it or that of `state` is None, it is not compared.
    """
    before, now = _flat(state.must_match), _flat(must_match(config))
    # A checkpoint of an earlier format lacks keys that were added since, and has those that are gone.
    before |= {key: value for key, value in versions.added(before).items() if key in now}
    before = {key: value for key, value in before.items() if key not in _NO_LONGER | versions.gone()}
    if _TOKENIZER in before:  # older checkpoints have its name alone
        now[_TOKENIZER] = config.data.tokenizer
    # Sources may be replaced on resume, so their fingerprints alone would not notice another tokenizer.
    if state.tokenizer and tokenizer and state.tokenizer["fingerprint"] != tokenizer["fingerprint"]:
        before[_TOKENIZER], now[_TOKENIZER] = map(_describe, (state.tokenizer, tokenizer))
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


def read_fingerprints(folder: RunFolder) -> Mapping[str, Any]:
    """Return the fingerprint of each source of a run, by name, which the launcher has computed.

    Raises DataError if summary.json has none.
    """
    hint = "resume the run, which writes it again"
    found = read_object(folder.summary, hint=hint).get("fingerprints")
    if not isinstance(found, dict):
        raise DataError("has no fingerprints of documents", key=str(folder.summary), hint=hint)
    return found


def check_fingerprints(
    now: Mapping[str, str], before: Mapping[str, str], read_lately: Mapping[str, str] | None = None
) -> None:
    """Raise DataError if the documents of a source have changed, or if a source has another name than before.

    Sources may be added and left out. One with another name would begin again at its first document. `read_lately` are
    the fields of each source that the first versions did not read.
    """
    gone = {fingerprint: name for name, fingerprint in before.items() if name not in now}
    for name, fingerprint in now.items():
        key = "data.path" if name == ONLY else f"data.sources.{name}.path"
        if (was := before.get(name, fingerprint)) != fingerprint:
            message = f"the documents changed since the run started ({fingerprint[:12]}, was {was[:12]})"
            if fields := (read_lately or {}).get(name):
                message += f", or an earlier version started it, which did not read {fields}"
            raise DataError(message, key=key, hint=f"restore them, or start over: {START_OVER}")
        if name not in before and fingerprint in gone:
            old = gone[fingerprint]
            message = f"source {name} has the documents of the run's source {old} and would begin again at the first"
            hint = (
                f"name it data.sources.{old} to continue after the documents that it had, or start over: {START_OVER}"
            )
            raise DataError(message, key=key, hint=hint)


def _describe(tokenizer: Mapping[str, Any]) -> str:
    """Name a tokenizer. A file of the same name may have other contents, or documents another BOS or EOS."""
    bos, eos = ("none" if tokenizer[key] is None else tokenizer[key] for key in ("bos", "eos"))
    return f"{tokenizer['name']} (BOS {bos}, EOS {eos}, fingerprint {tokenizer['fingerprint'][:12]})"


def _text(value: Any) -> str:
    return "null" if value is None else str(value)


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten values that are mappings, such as rotary scaling, to one dotted key per entry."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= {f"{key}.{inner}": one for inner, one in value.items()} if isinstance(value, Mapping) else {key: value}
    return flat
