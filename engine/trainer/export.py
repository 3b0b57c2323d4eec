"""Exports a checkpoint as Hugging Face weights, in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.config.load import read_resolved
from engine.config.schema import Config
from engine.data.tokenizers.load import BYTES, open_tokenizer, recognise, tokenizer_file
from engine.dtypes import DTYPES
from engine.errors import CheckpointError, DataError
from engine.family.families import parameters_of, stored_names
from engine.family.parameters import HEAD
from engine.files import write_json
from engine.readers import LARGE, read_bytes, read_object
from engine.run import checkpoints
from engine.run.checkpoints import TrainState
from engine.run.compatibility import check_compatible
from engine.run.folder import RunFolder
from engine.run.saved import verified
from engine.weights.check import expected_shapes
from engine.weights.config_json import config_json
from engine.weights.generation import GENERATION, generation_config
from engine.weights.tokenizer import copy_tokenizer
from engine.weights.write import Entry, new_folder, write_weights
from engine.zero.states import Weights, master_weights, model_weights


def export_weights(
    source: Path, out: Path, dtype: str | None, shard_bytes: int, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Write a checkpoint to the new folder `out` as safetensors files and config.json, in Hugging Face's format.

    `source` is a checkpoint, or a run, whose newest intact checkpoint is used. `dtype` is bf16 or fp32; None keeps the
    dtype of the run. fp32 exports the master weights of a bf16 run. Each file contains at most `shard_bytes`, or one
    larger tensor. The files of the run's tokenizer are copied. `say` gets warnings about damaged checkpoints, and why
    there is no tokenizer. Returns a summary for the user; its `left_out` lists tensors of the model that Hugging Face's
    format does not have. Raises CheckpointError if there is no intact checkpoint, ConfigError if `out` exists.
    """
    with new_folder(out) as draft:  # first, because checking the checkpoint takes minutes
        saved = open_checkpoint(source, say)
        folder, config, facts = saved.folder, saved.config, saved.facts
        dtype = dtype or config.dtype
        # In a bf16 run only the optimizer states contain fp32 weights, in the files of all ranks.
        table = parameters_of(config.model)
        held = model_weights(folder, table)
        weights = master_weights(folder, table) if (dtype, config.dtype) == ("fp32", "bf16") else held
        entries = _entries(weights, config, DTYPES[dtype])
        # Runs of earlier versions have not recorded the token that ends a turn.
        ends_turn = {} if "end_of_turn" in facts else {"end_of_turn": _end_of_turn(config.data.tokenizer)}
        generation = generation_config({**facts, **ends_turn})
        ends = generation.get("bos_token_id"), generation.get("eos_token_id")
        described = config_json(config.model, config.context, str(DTYPES[dtype]).removeprefix("torch."), *ends)
        write_json(draft / GENERATION, generation)
        tokenizer = _copy_tokenizer(config.data.tokenizer, made_by_others(facts), draft, say)
        shards = write_weights(draft, described, entries, shard_bytes)
    return {
        "out": str(out),
        "checkpoint": str(folder),
        "step": saved.state.step,
        "dtype": dtype,
        "shards": len(shards),
        "bytes": sum(entry.bytes for entry in entries),
        "tokenizer": tokenizer,
        "left_out": sorted(held.keys() - stored_names(config.model).keys() - {HEAD}),
    }


class Saved(NamedTuple):
    """An intact checkpoint and what its run says about it."""

    folder: Path
    state: TrainState
    config: Config
    facts: Mapping[str, Any]  # of documents and model: the run's summary.json, empty if there is none


def open_checkpoint(source: Path, say: Callable[[str], None]) -> Saved:
    """Check `source`, a checkpoint or a run, whose newest intact checkpoint is used, and read its config.

    `say` gets warnings about damaged checkpoints. Raises CheckpointError if there is no intact checkpoint, or if it
    does not belong to the config of its run.
    """
    folder = verified(source, say)
    state = checkpoints.read_state(folder)
    run = RunFolder(folder.absolute().parent.parent)
    if not run.resolved.exists():
        hint = "choose a checkpoint inside its run folder: RUN/checkpoints/step-..."
        raise CheckpointError(f"its run has no {run.resolved.name}", key=str(folder), hint=hint)
    config = read_resolved(run.resolved)
    check_compatible(folder, state, config)
    facts = read_object(run.summary) if run.summary.exists() else {}
    return Saved(folder, state, config, facts)


def made_by_others(facts: Mapping[str, Any]) -> list[str]:
    """Return the kinds of tokenizers, other than bytes, that made the tokens of a run's documents."""
    return [kind for kind in facts.get("tokenizers", []) if kind != BYTES]


def _end_of_turn(tokenizer: str) -> int | None:
    """Return the token that ends a turn, for runs whose summary.json does not have it; None if it is not known."""
    with suppress(DataError):
        return open_tokenizer(tokenizer).end_of_turn
    return None


def _copy_tokenizer(tokenizer: str, others: list[str], draft: Path, say: Callable[[str], None]) -> list[str]:
    """Copy the files of the run's tokenizer, and return their names. `say` gets why there are none.

    `others` as `made_by_others` returns them. Weights are exported without a tokenizer too: the run may have been made
    on another machine.
    """
    try:
        # The run may be another user's, and its config name any file of this user.
        path = tokenizer_file(tokenizer)
        if path is not None and path.is_file():
            recognise(path, read_bytes(path, LARGE))
        copied = copy_tokenizer(tokenizer, draft)
    except DataError as error:
        (problem,) = error.problems
        say(f"warning: no tokenizer in the folder: {problem.key}: {problem.message}; {problem.hint}")
        return []
    if not copied and others:
        made = (
            f"another tokenizer ({', '.join(others)}) made the run's token files, and data.tokenizer does not name it"
        )
        say(f"warning: no tokenizer in the folder: {made}; copy its files into the folder by hand")
    elif not copied:
        say("no tokenizer in the folder: data.tokenizer=bytes has no files, and transformers has no equivalent")
    return copied


def _entries(weights: Weights, config: Config, dtype: torch.dtype) -> list[Entry]:
    """Return the tensors to write, with Hugging Face's names. Stacked experts become one tensor per expert."""

    def read(ours: str, expert: int | None) -> Tensor:
        """Read our tensor `ours`, or only its slice of one expert, in the dtype of the export."""
        tensor = weights[ours]()
        if expert is None:
            return tensor.to(dtype).contiguous()
        return tensor[expert].to(dtype, copy=True)  # a view would keep all experts in memory

    sizes = {name: torch.Size(size).numel() * dtype.itemsize for name, size in expected_shapes(config).items()}
    return [
        Entry(theirs, sizes[theirs], partial(read, ours, expert if len(names) > 1 else None))
        for ours, names in stored_names(config.model).items()
        for expert, theirs in enumerate(names)
    ]
