"""From a checkpoint to Hugging Face's form, in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.config.load import read_resolved
from engine.config.schema import Config
from engine.data.tokenizer import BOS, EOS
from engine.dtypes import DTYPES
from engine.errors import CheckpointError
from engine.trainer import checkpoint as checkpoints
from engine.trainer.folder import RunFolder
from engine.trainer.lineage import check_lineage
from engine.trainer.saved import verified
from engine.weights.architectures import HEAD, tensor_names
from engine.weights.check import expected_shapes
from engine.weights.config_json import config_json
from engine.weights.write import Entry, new_folder, write_weights
from engine.zero.states import Weights, master_weights, model_weights


def export_weights(
    source: Path, out: Path, dtype: str | None, shard_bytes: int, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Write a checkpoint, or the newest whole one of a run, as safetensors and config.json; return what was written.

    `dtype` is bf16 or fp32; None is the run's. fp32 of a bf16 run are its masters. `left_out` names what the model
    holds and their form has no place for. Raises CheckpointError if there is no whole checkpoint, ConfigError if `out`
    is there already.
    """
    with new_folder(out) as draft:  # first of all: a target that is refused must not cost the reading of a checkpoint
        folder = verified(source, say)
        state = checkpoints.read_state(folder)
        config = _config_of(folder, state)
        dtype = dtype or config.dtype
        held = model_weights(folder)
        weights = master_weights(folder) if (dtype, config.dtype) == ("fp32", "bf16") else held
        entries = _entries(weights, config, DTYPES[dtype])
        described = config_json(config.model, config.context, str(DTYPES[dtype]).removeprefix("torch."), BOS, EOS)
        shards = write_weights(draft, described, entries, shard_bytes)
    return {
        "out": str(out),
        "checkpoint": str(folder),
        "step": state.step,
        "dtype": dtype,
        "shards": len(shards),
        "bytes": sum(entry.bytes for entry in entries),
        "left_out": sorted(held.keys() - tensor_names(config.model).keys() - {HEAD}),
    }


def _config_of(folder: Path, state: checkpoints.TrainState) -> Config:
    """Return the config of the run that a checkpoint lies in; its own record of the model must agree."""
    run = RunFolder(folder.absolute().parent.parent)
    if not run.resolved.exists():
        hint = "name a checkpoint inside its run folder: RUN/checkpoints/step-..."
        raise CheckpointError(f"there is no {run.resolved.name} of its run", key=str(folder), hint=hint)
    config = read_resolved(run.resolved)
    check_lineage(folder, state, config, state.ranks)
    return config


@dataclass(frozen=True)
class _Part:
    """How one of their tensors is read: a parameter of ours, or an expert's entry of a stacked one."""

    weights: Weights
    ours: str
    expert: int | None
    dtype: torch.dtype

    def __call__(self) -> Tensor:
        whole = self.weights[self.ours]()
        if self.expert is None:
            return whole.to(self.dtype).contiguous()
        return whole[self.expert].to(self.dtype, copy=True)  # no view: it would keep all experts in memory


def _entries(weights: Weights, config: Config, dtype: torch.dtype) -> list[Entry]:
    sizes = {name: torch.Size(size).numel() * dtype.itemsize for name, size in expected_shapes(config).items()}
    return [
        Entry(theirs, sizes[theirs], _Part(weights, ours, expert if len(names) > 1 else None, dtype))
        for ours, names in tensor_names(config.model).items()
        for expert, theirs in enumerate(names)
    ]
