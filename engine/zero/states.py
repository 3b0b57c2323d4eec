"""What DeepSpeed's checkpoint files hold, read in one process and without torch.distributed.

In stages 1 and 2 `mp_rank_00_model_states.pt` has the whole model in the dtype in which it computes. In bf16 the fp32
masters lie in the ranks' optimizer states: each parameter in fragments, in the order of the ranks.
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
_OPTIMIZER = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")


class _Fragment:
    """Where a part of a parameter lies in its rank's flat masters: `start` and `numel`, set by the unpickler."""

    start: int
    numel: int


class _Unread:
    """Whatever else DeepSpeed pickles there."""

    def __init__(self, *_: Any) -> None:
        pass


# Stand-ins by the names of DeepSpeed's classes: nothing else can be unpickled, and DeepSpeed need not be imported.
_CLASSES: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (_Fragment, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_Unread, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Unread, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
]
Weights = Mapping[str, Callable[[], Tensor]]  # by name, each read when it is asked for


def model_weights(checkpoint: Path) -> Weights:
    """Return the model's weights in the run's dtype. The file is mapped: only what is asked for is read."""
    module = _load(checkpoint / _MODEL)["module"]
    return {name: partial(module.get, name) for name in module}


def master_weights(checkpoint: Path) -> Weights:
    """Return the fp32 masters of a bf16 run, joined from all ranks' fragments."""
    pieces: dict[str, list[Tensor]] = {}
    for path in _optimizer_files(checkpoint):
        for name, piece in _fragments(path):
            pieces.setdefault(name, []).append(piece)
    sizes = {name: size for group in _load(checkpoint / _MODEL)["param_shapes"] for name, size in group.items()}

    @lru_cache(maxsize=1)  # the experts of a stacked parameter are asked for in turn
    def joined(name: str) -> Tensor:
        return torch.cat(pieces[name]).view(sizes[name])

    return {name: partial(joined, name) for name in sizes}


def _optimizer_files(checkpoint: Path) -> list[Path]:
    """Return the ranks' files, rank 0 first."""
    found = [(match, path) for path in (checkpoint / "zero").iterdir() if (match := _OPTIMIZER.fullmatch(path.name))]
    return [path for _, path in sorted(found, key=lambda one: int(one[0][2]))]


def _fragments(path: Path) -> list[tuple[str, Tensor]]:
    """Return the parts of parameters that one rank owns."""
    optimizer = _load(path)["optimizer_state_dict"]
    flat, mappings = optimizer["single_partition_of_fp32_groups"], optimizer["param_slice_mappings"]
    return [
        (name, values.narrow(0, at.start, at.numel))
        for values, mapping in zip(flat, mappings, strict=True)
        for name, at in mapping.items()
    ]


def _load(path: Path) -> dict[str, Any]:
    with torch.serialization.safe_globals(_CLASSES):
        states: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return states
