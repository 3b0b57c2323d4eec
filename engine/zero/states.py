"""What DeepSpeed's checkpoint files hold, read in one process and without torch.distributed.

In stages 1 and 2 `mp_rank_00_model_states.pt` has the whole model in the dtype in which it computes. In bf16 the fp32
masters lie in the ranks' optimizer states: each parameter in fragments, in the order of the ranks. In stage 3 only they
are there, and each rank has an equal share of each parameter, the last one filled up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_MODEL = "zero/mp_rank_00_model_states.pt"
_SHARED = "zero/zero_pp_rank_0_mp_rank_00_model_states.pt"  # stage 3: names and shapes, and what is no parameter
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
    """Return the model's weights in the run's dtype, in stage 3 in fp32, of which a run in bf16 rounds its own.

    Files are mapped: only what is asked for is read.
    """
    module = _facts(checkpoint)["module"]
    held = {name: partial(module.get, name) for name in module}
    return held if (checkpoint / _MODEL).exists() else held | dict(master_weights(checkpoint))


def master_weights(checkpoint: Path) -> Weights:
    """Return the fp32 masters of a run in bf16 or in stage 3, joined from all ranks' shares."""
    pieces: dict[str, list[Tensor]] = {}
    sizes = {name: size for group in _facts(checkpoint)["param_shapes"] for name, size in group.items()}
    files = _optimizer_files(checkpoint)
    for path in files:
        for name, piece in _pieces(path, sizes, len(files)):
            pieces.setdefault(name, []).append(piece)

    @lru_cache(maxsize=1)  # the experts of a stacked parameter are asked for in turn
    def joined(name: str) -> Tensor:
        return torch.cat(pieces[name])[: sizes[name].numel()].view(sizes[name])

    return {name: partial(joined, name) for name in sizes}


def _facts(checkpoint: Path) -> dict[str, Any]:
    whole = checkpoint / _MODEL
    return _load(whole if whole.exists() else checkpoint / _SHARED)


def _optimizer_files(checkpoint: Path) -> list[Path]:
    """Return the ranks' files, rank 0 first."""
    found = [(match, path) for path in (checkpoint / "zero").iterdir() if (match := _OPTIMIZER.fullmatch(path.name))]
    return [path for _, path in sorted(found, key=lambda one: int(one[0][2]))]


def _pieces(path: Path, sizes: Mapping[str, torch.Size], ranks: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the parts of parameters that one rank owns."""
    optimizer = _load(path)["optimizer_state_dict"]
    if "fp32_flat_groups" in optimizer:
        yield from _shares(iter(optimizer["fp32_flat_groups"]), sizes, ranks)
        return
    flat, mappings = optimizer["single_partition_of_fp32_groups"], optimizer["param_slice_mappings"]
    for values, mapping in zip(flat, mappings, strict=True):
        for name, at in mapping.items():
            yield name, values.narrow(0, at.start, at.numel)


def _shares(flats: Iterator[Tensor], sizes: Mapping[str, torch.Size], ranks: int) -> Iterator[tuple[str, Tensor]]:
    """Yield a rank's equal shares of parameters, which lie one after another in its groups."""
    flat, start = next(flats), 0
    for name, size in sizes.items():
        share = -(-size.numel() // ranks)
        if start + share > len(flat):
            flat, start = next(flats), 0
        yield name, flat.narrow(0, start, share)
        start += share


def _load(path: Path) -> dict[str, Any]:
    with torch.serialization.safe_globals(_CLASSES):
        states: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return states
