"""Reads the weights in DeepSpeed's checkpoint files, in one process and without torch.distributed.

The table shows which files contain the weights in the run's dtype, and the fp32 master weights.

| ZeRO stage, dtype | weights in the run's dtype | fp32 master weights |
|---|---|---|
| 1 or 2, fp32 | model states | model states |
| 1 or 2, bf16 | model states | optimizer states, in fragments of parameters per rank, joined in rank order |
| 3 | not stored: round the master weights | optimizer states, one equal shard of each parameter per rank (padded) |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_MODEL = "zero/mp_rank_00_model_states.pt"
_SHARED = "zero/zero_pp_rank_0_mp_rank_00_model_states.pt"  # stage 3: names, shapes and buffers
_OPTIMIZER = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")


class _Fragment:
    """A range of a rank's flat master weights that contains part of a parameter. The unpickler sets the attributes."""

    start: int
    numel: int


class _Unread:
    """Replaces other objects in the files, which are not needed here."""

    def __init__(self, *_: Any) -> None:
        pass


# Stand-ins, with the names of DeepSpeed's classes. No other class can be unpickled, and DeepSpeed is not imported.
_CLASSES: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (_Fragment, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_Unread, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Unread, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
]
Weights = Mapping[str, Callable[[], Tensor]]  # parameter name -> a function that reads the tensor


def model_weights(checkpoint: Path) -> Weights:
    """Return the weights and buffers of a checkpoint by name: in the run's dtype, or in fp32 under ZeRO-3.

    Files are memory-mapped; tensors are read when their functions are called.
    """
    module = _model_states(checkpoint)["module"]
    held = {name: partial(module.get, name) for name in module}
    return held if (checkpoint / _MODEL).exists() else held | dict(master_weights(checkpoint))


def master_weights(checkpoint: Path) -> Weights:
    """Return the fp32 master weights of a bf16 or ZeRO-3 checkpoint by name, joined from the files of all ranks."""
    sizes = {name: size for group in _model_states(checkpoint)["param_shapes"] for name, size in group.items()}
    found = [(match, path) for path in (checkpoint / "zero").iterdir() if (match := _OPTIMIZER.fullmatch(path.name))]
    files = [path for _, path in sorted(found, key=lambda one: int(one[0][2]))]  # parts are joined in rank order
    parts: dict[str, list[Tensor]] = {}
    for path in files:
        optimizer = _load(path)["optimizer_state_dict"]
        if "fp32_flat_groups" not in optimizer:
            flat, mappings = optimizer["single_partition_of_fp32_groups"], optimizer["param_slice_mappings"]
            for values, mapping in zip(flat, mappings, strict=True):
                for name, at in mapping.items():
                    parts.setdefault(name, []).append(values.narrow(0, at.start, at.numel))
            continue
        # Stage 3: one shard of each parameter, equal on all ranks. A group ends where the next shard does not fit.
        groups = iter(optimizer["fp32_flat_groups"])
        group, start = next(groups), 0
        for name, size in sizes.items():
            shard = -(-size.numel() // len(files))
            if start + shard > len(group):
                group, start = next(groups), 0
            parts.setdefault(name, []).append(group.narrow(0, start, shard))
            start += shard

    @lru_cache(maxsize=1)  # the experts of a stacked parameter are read one after another
    def joined(name: str) -> Tensor:
        return torch.cat(parts[name])[: sizes[name].numel()].view(sizes[name])

    return {name: partial(joined, name) for name in sizes}


def _model_states(checkpoint: Path) -> dict[str, Any]:
    """Load the file of model states: the only one in stages 1 and 2, that of rank 0 in stage 3."""
    unsharded = checkpoint / _MODEL
    return _load(unsharded if unsharded.exists() else checkpoint / _SHARED)


def _load(path: Path) -> dict[str, Any]:
    """Load a file to the CPU, memory-mapped. Refuses to unpickle classes other than PyTorch's and `_CLASSES`."""
    with torch.serialization.safe_globals(_CLASSES):
        states: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return states
