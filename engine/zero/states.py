"""Reads DeepSpeed's checkpoint files by parameter, in any process and without torch.distributed.

The table shows which files contain the weights in the run's dtype, and the fp32 master weights.

| ZeRO stage, dtype | weights in the run's dtype | fp32 master weights and moments |
|---|---|---|
| 1 or 2, fp32 | model states | optimizer states, and the weights also in the model states |
| 1 or 2, bf16 | model states | optimizer states |
| 3 | not stored: round the master weights | optimizer states |

`partition.py` says where a parameter lies in the optimizer states of the ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.zero.partition import places

MASTER = "master"  # the key of the fp32 master weights among the states of a parameter
# DeepSpeed's names of the flat master weights, and of the state of the optimizer that updates them.
_STAGE_1_OR_2 = "single_partition_of_fp32_groups", "base_optimizer_state"
_STAGE_3 = "fp32_flat_groups", "optimizer_state_dict"
_MODEL = "zero/mp_rank_00_model_states.pt"
_SHARED = "zero/zero_pp_rank_0_mp_rank_00_model_states.pt"  # stage 3: names, shapes and buffers
_OPTIMIZER = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")


class _Unread:
    """Replaces objects in the files that are not needed here."""

    def __init__(self, *_: Any) -> None:
        pass


# Stand-ins, with the names of DeepSpeed's classes. No other class can be unpickled, and DeepSpeed is not imported.
_CLASSES: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (_Unread, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_Unread, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Unread, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
]
Weights = Mapping[str, Callable[[], Tensor]]  # parameter name -> a function that reads the tensor


class SavedStates:
    """The model states of a checkpoint: buffers, fp32 master weights and the optimizer's states.

    Files are memory-mapped, and those of a rank are opened when they are first needed, so a process reads only the
    bytes that it asks for.
    """

    def __init__(self, checkpoint: Path) -> None:
        model = _model_states(checkpoint)
        self.stage = int(model["ds_config"]["zero_optimization"]["stage"])
        self.buffers: dict[str, Tensor] = {name: model["module"][name] for name in model["buffer_names"]}
        self.shapes: dict[str, torch.Size] = {name: at for group in model["param_shapes"] for name, at in group.items()}
        found = {match: path for path in (checkpoint / "zero").iterdir() if (match := _OPTIMIZER.fullmatch(path.name))}
        self._files = {int(match[2]): path for match, path in found.items()}
        self.ranks = len(self._files)
        self._opened: dict[int, list[dict[str, Any]]] = {}

        first = self._states(0)
        # Rank 0 stores no padding, unless it stores all elements of a group; then the length does not matter.
        lengths = [len(flat[MASTER]) for flat in first]
        groups = [{name: size.numel() for name, size in group.items()} for group in model["param_shapes"]]
        self._places = places(groups, lengths, self.stage, self.ranks)
        # AdamW has `exp_avg`, `exp_avg_sq` and `step`, a tensor or an int; SGD has `momentum_buffer` or nothing.
        self.keys = [key for key in first[0] if key != "step"]
        self.step = int(first[0]["step"]) if "step" in first[0] else None  # the optimizer's number of updates

    def read(self, name: str, key: str, start: int, out: Tensor) -> None:
        """Copy elements of a parameter's state `key`, beginning with the element `start`, into the 1-D tensor `out`."""
        place, done = self._places[name], 0
        for rank, at, count in place.pieces(start, start + len(out)):
            out[done : done + count] = self._states(rank)[place.group][key][at : at + count]
            done += count

    def _states(self, rank: int) -> list[dict[str, Any]]:
        """The flat tensors of a rank, by key, in the order of the groups."""
        if rank not in self._opened:
            optimizer = _load(self._files[rank])["optimizer_state_dict"]
            master, base = _STAGE_3 if self.stage == 3 else _STAGE_1_OR_2
            masters, states = optimizer[master], optimizer[base]["state"]
            self._opened[rank] = [{MASTER: flat} | states.get(group, {}) for group, flat in enumerate(masters)]
        return self._opened[rank]


def model_weights(checkpoint: Path) -> Weights:
    """Return the weights and buffers of a checkpoint by name: in the run's dtype, or in fp32 under ZeRO-3.

    Tensors are read when their functions are called.
    """
    module = _model_states(checkpoint)["module"]
    held = {name: partial(module.get, name) for name in module}
    return held if (checkpoint / _MODEL).exists() else held | dict(master_weights(checkpoint))


def master_weights(checkpoint: Path) -> Weights:
    """Return the fp32 master weights of a checkpoint by name, joined from the files of all ranks."""
    saved = SavedStates(checkpoint)

    @lru_cache(maxsize=1)  # the experts of a stacked parameter are read one after another
    def joined(name: str) -> Tensor:
        whole = torch.empty(saved.shapes[name].numel())
        saved.read(name, MASTER, 0, whole)
        return whole.view(saved.shapes[name])

    return {name: partial(joined, name) for name in saved.shapes}


def _model_states(checkpoint: Path) -> dict[str, Any]:
    """Load the file of model states: the only one in stages 1 and 2, that of rank 0 in stage 3."""
    unsharded = checkpoint / _MODEL
    return _load(unsharded if unsharded.exists() else checkpoint / _SHARED)


def _load(path: Path) -> dict[str, Any]:
    """Load a file to the CPU, memory-mapped.

    Raises CheckpointError for a file with objects of classes other than PyTorch's and `_CLASSES`, which could run code.
    """
    try:
        with torch.serialization.safe_globals(_CLASSES):
            states: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except UnpicklingError as error:
        message = f"contains objects that are no tensors: {str(error).strip().splitlines()[-1]}"
        raise CheckpointError(message, key=str(path), hint="use a checkpoint that ByteScale has written") from error
    return states
