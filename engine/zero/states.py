"""Reads the states of a checkpoint by parameter, in any process and without torch.distributed.

Each rank has saved the files of DeepSpeed; now as entries of its part of its node's file (part.py), by the names that
DeepSpeed gives files, in older checkpoints as files. The table shows which of them contain the weights in the run's
dtype, and the fp32 master weights.

| ZeRO stage, dtype | weights in the run's dtype | fp32 master weights and moments |
|---|---|---|
| 1 or 2, fp32 | model states | optimizer states, and the weights also in the model states |
| 1 or 2, bf16 | model states | optimizer states |
| 3 | not stored: round the master weights | optimizer states |

`partition.py` computes where a parameter is in the optimizer states of the HDP ranks. With tensor and pipeline
parallelism, each device of an HDP rank saves such files for the part of the model that it stores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO

import torch
from torch import Tensor

from engine.cluster.mesh import Mesh
from engine.cluster.mesh import Place as Coordinates
from engine.config.schema import Config
from engine.errors import CheckpointError
from engine.family.parameters import Parameters
from engine.models.split import dim_of, runs
from engine.run.checkpoints import COPY_AGAIN, Parts
from engine.zero.part import read
from engine.zero.partition import Place, places

MASTER = "master"  # the key of the fp32 master weights among the states of a parameter
_STEP = "step"  # the key of the optimizer's count of updates, which does not have the shape of the parameter
# DeepSpeed's names of the flat master weights, and of the state of the optimizer that updates them.
_STAGE_1_OR_2 = "single_partition_of_fp32_groups", "base_optimizer_state"
_STAGE_3 = "fp32_flat_groups", "optimizer_state_dict"
_MODEL = "zero/mp_rank_{:02d}_model_states.pt"
_SHARED = "zero/zero_pp_rank_0_mp_rank_{:02d}_model_states.pt"  # stage 3: names, shapes and buffers
_OPTIMIZER = (
    "zero/zero_pp_rank_{}_mp_rank_{:02d}_optim_states.pt",
    "zero/bf16_zero_pp_rank_{}_mp_rank_{:02d}_optim_states.pt",
)
_TIED = {"head.weight": "embedding.weight"}  # copy of a tied weight -> the weight
_MESH = "mesh"  # the key of `Written` in the files of model states; older ones have none


class _Unread:
    """Replaces objects in the files that are not needed here."""

    def __init__(self, *_: Any) -> None:
        pass


# Stand-ins, with the names of DeepSpeed's classes. No other class can be unpickled, and DeepSpeed is not imported.
_CLASSES: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (_Unread, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_Unread, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Unread, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Unread, "builtins.getattr"),  # with which Python 3.11.0 to 3.11.3 pickles a member of an enum, ZeroStageEnum here
]
Weights = Mapping[str, Callable[[], Tensor]]  # parameter name -> a function that reads the tensor


@dataclass(frozen=True)
class Written:
    """The mesh that wrote a checkpoint."""

    tp: int = 1
    pp: int = 1
    vocab: int = 0  # of the model, for versions that had no table of its parameters
    ep: int = 1

    @classmethod
    def of(cls, config: Config) -> Written:
        """The mesh of a run."""
        return cls(config.parallel.tp, config.parallel.pp, config.model.vocab, config.parallel.ep)

    def to_client_state(self) -> dict[str, Any]:
        """What DeepSpeed saves with the model states."""
        return {_MESH: asdict(self)}


@dataclass(frozen=True)
class Own:
    """What this rank stores, in the form in which a checkpoint says what its ranks have stored."""

    device: int  # stage x tp + tp rank
    rank: int  # among the HDP ranks
    ranks: int  # number of HDP ranks
    written: Written
    stage: int  # of ZeRO
    groups: Sequence[Mapping[str, int]]  # elements by name, in the order of the flat tensors
    lengths: Sequence[int]  # of the flat tensors


class _Files:
    """The states that ranks have saved, by the names of DeepSpeed's files. They are memory-mapped when first needed.

    No folder is listed, since it has a file of each node, and in older checkpoints of each rank.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint, self._parts = checkpoint, Parts(checkpoint)
        self._read = dict[int, dict[str, Any]]()  # parts by global rank

    def model_states(self, number: int) -> dict[str, Any]:
        """Return a device's model states, of which it has one file; see `has_device` for `number`.

        Raises CheckpointError if there is none.
        """
        if (found := self._first(self._of_model(number), 0, number)) is None:
            message = f"has no {_MODEL.format(number)}, the part of the model of one of its devices"
            raise CheckpointError(message, key=str(self._checkpoint), hint=COPY_AGAIN)
        return found

    def optimizer_states(self, rank: int, number: int) -> dict[str, Any]:
        """Return the optimizer states of an HDP rank on a device. Raises CheckpointError if there are none."""
        names = [name.format(rank, number) for name in _OPTIMIZER]
        if (found := self._first(names, rank, number)) is None:
            message = f"has no {names[0]}, the optimizer states of one of its ranks"
            raise CheckpointError(message, key=str(self._checkpoint), hint=COPY_AGAIN)
        states: dict[str, Any] = found["optimizer_state_dict"]
        return states

    def has_device(self, number: int) -> bool:
        """Return whether there is a device of this number, DeepSpeed's model parallel rank: stage x tp + tp rank."""
        if self._parts.known:
            return number < math.prod(self._degrees)
        return any((self._checkpoint / name).exists() for name in self._of_model(number))

    def has_weights(self) -> bool:
        """Return whether the model states have the weights in the run's dtype (see the table above)."""
        if self._parts.known:
            return _MODEL.format(0) in self._part(0, 0)
        return (self._checkpoint / _MODEL.format(0)).exists()

    def _of_model(self, number: int) -> list[str]:
        return [name.format(number) for name in (_MODEL, _SHARED)]

    def _first(self, names: Sequence[str], rank: int, number: int) -> dict[str, Any] | None:
        """Return what an HDP rank has saved on a device, under the first of these names that exists; None if none does.

        `number` is that of the device, see `has_device`.
        """
        if self._parts.known:
            part = self._part(rank, number)
            return next((part[name] for name in names if name in part), None)
        paths = (self._checkpoint / name for name in names)
        return next((_load(path, path) for path in paths if path.exists()), None)

    def _part(self, rank: int, number: int) -> dict[str, Any]:
        """Return the part of an HDP rank on a device."""
        (tp, pp), ranks = self._degrees, self._parts.state.ranks
        stage, tp_rank = divmod(number, tp)
        whose = Mesh(ranks // (tp * pp), tp, pp).rank(Coordinates(rank, tp_rank, stage))
        if whose not in self._read:
            name, start, stop = self._parts.of(whose)
            path = self._checkpoint / name
            try:
                self._read[whose] = read(path, start, stop, lambda file: _load(file, path))
            except ValueError as error:
                raise CheckpointError(f"has no part of rank {whose}", key=str(path), hint=COPY_AGAIN) from error
        return self._read[whose]

    @property
    def _degrees(self) -> tuple[int, int]:
        """The tp and pp of the ranks."""
        mesh = self._parts.state.mesh or {}
        return mesh.get("tp", 1), mesh.get("pp", 1)


class _Device:
    """The states of one tp rank on one stage, of its part of the model, sharded over the HDP ranks."""

    def __init__(self, files: _Files, number: int, table: Parameters, own: Own | None = None) -> None:
        """`number` is stage x tp + tp rank, DeepSpeed's model parallel rank; `own` is what this rank stores."""
        model = files.model_states(number)
        self._files, self._number, self._table = files, number, table
        self.written, self.stage = _written(model), int(model["ds_config"]["zero_optimization"]["stage"])
        self.ranks = int(model["dp_world_size"])  # HDP ranks
        self.groups = [{name: size.numel() for name, size in group.items()} for group in model["param_shapes"]]
        self.names = dict.fromkeys(name for group in self.groups for name in group)
        self.buffers = {name: model["module"][name] for name in model["buffer_names"]}
        self._own = own if own is not None and self._matches(own) else None
        self._opened: dict[int, list[dict[str, Any]]] = {}

    def _matches(self, own: Own) -> bool:
        """Return whether the checkpoint's ranks stored what those that read it store; lengths are not compared."""
        mesh, other = ((one.tp, one.pp, one.ep) for one in (self.written, own.written))
        if (self._number, mesh, self.ranks, self.stage) != (own.device, other, own.ranks, own.stage):
            return False
        return [[*group.items()] for group in self.groups] == [[*group.items()] for group in own.groups]

    def group_of(self, name: str) -> dict[str, Any]:
        """The states of a parameter's group on an HDP rank, flat, by key."""
        return self._states(self._own.rank if self._own else 0)[self._places[name].group]

    def read(self, name: str, key: str, start: int, out: Tensor) -> None:
        """Copy elements of the flattened part of a parameter's state, beginning with `start`, into `out`.

        The shares of experts that the ranks of an ep group store are one part, in the order of these ranks.
        """
        place, done = self._places[name], 0
        ep = self.written.ep if self._table[name].stacked else 1
        while done < len(out):
            # The ranks ep_rank, ep_rank + ep, ... store one share of the experts.
            ep_rank, inside = divmod(start + done, place.size)
            for rank, at, count in place.pieces(inside, min(place.size, inside + len(out) - done)):
                states = self._states(rank * ep + ep_rank)[place.group]
                out[done : done + count] = states[key][at : at + count]
                done += count

    @cached_property
    def _places(self) -> dict[str, Place]:
        """Where each parameter is. The lengths of flat tensors are known from this rank's own, or from rank 0's."""
        own = self._own
        if own is not None:
            found = places(self.groups, own.lengths, self.stage, self.ranks)
            stored = [0] * len(own.lengths)  # without the padding, which DeepSpeed leaves out in some stages
            for name, place in found.items():
                start, stop, _ = place.on_rank(own.rank // (self.written.ep if self._table[name].stacked else 1))
                stored[place.group] += max(0, stop - start)
            saved = [len(flat[MASTER]) for flat in self._states(own.rank)]
            if all(size in either for size, *either in zip(saved, own.lengths, stored, strict=True)):
                return found
        # Rank 0 stores no padding, unless it stores all elements of a group; then the length is not needed.
        return places(self.groups, [len(flat[MASTER]) for flat in self._states(0)], self.stage, self.ranks)

    def _states(self, rank: int) -> list[dict[str, Any]]:
        """The flat tensors of a rank, by key, in the order of the groups."""
        if rank not in self._opened:
            optimizer = self._files.optimizer_states(rank, self._number)
            master, base = _STAGE_3 if self.stage == 3 else _STAGE_1_OR_2
            masters, states = optimizer[master], optimizer[base]["state"]
            self._opened[rank] = [{MASTER: flat} | states.get(group, {}) for group, flat in enumerate(masters)]
        return self._opened[rank]


class SavedStates:
    """The model states of a checkpoint of any mesh: buffers, fp32 master weights and the optimizer's states.

    A process reads only the bytes that it requests, and opens only the files that have them. A rank that stores what a
    rank of the checkpoint has stored opens the file of that rank's node.
    """

    def __init__(self, checkpoint: Path, table: Parameters, own: Own | None = None) -> None:
        """`table` has the parameters of the model (`engine.family.families.parameters_of`).

        `own` is what this rank stores; None in a process that is no rank.
        """
        self.table = table
        self._files, self._own = _Files(checkpoint), own
        self._opened = dict[int, _Device]()  # by number
        first = own.device if own and self._files.has_device(own.device) else 0
        device = self._device(first)
        self.ranks, self.stage, self._written = device.ranks, device.stage, device.written
        # Devices are numbered stage x tp + tp rank. The tp ranks of a stage have the same parameters and buffers.
        stage, self._tp_rank = divmod(first, device.written.tp)
        self._stages = [stage, *(other for other in range(device.written.pp) if other != stage)]  # in order of search

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shapes of all parameters, whole. Opens the files of a device of each stage."""
        names = [name for stage in sorted(self._stages) for name in self._device_of_stage(stage).names]
        return {name: torch.Size(self.table[name].shape) for name in names}

    @property
    def buffers(self) -> dict[str, Tensor]:
        """All buffers. Opens the files of a device of each stage."""
        return {
            name: value
            for stage in sorted(self._stages)
            for name, value in self._device_of_stage(stage).buffers.items()
        }

    def buffer(self, name: str) -> Tensor | None:
        """Return a buffer; None if the checkpoint has none of that name."""
        return next(
            (
                self._device_of_stage(stage).buffers[name]
                for stage in self._stages
                if name in self._device_of_stage(stage).buffers
            ),
            None,
        )

    def keys(self, name: str) -> list[str]:
        """Return the keys of the states of a parameter: the master weight, and the states of the optimizer."""
        return [key for key in self._states_of_group(name) if key != _STEP]

    def step(self, name: str) -> int | None:
        """Return the number of updates that the optimizer has counted for a parameter; None if it counts none."""
        found = self._states_of_group(name).get(_STEP)  # a tensor; in older checkpoints also an int
        return None if found is None else int(found)

    def read(self, name: str, key: str, start: int, out: Tensor, tp: int = 1, tp_rank: int = 0) -> None:
        """Copy elements of a parameter's state `key`, beginning with the element `start`, into the 1-D tensor `out`.

        Elements are counted in the flattened slice of device `tp_rank` of `tp`. Those that pad the vocabulary stay as
        they are. The copy of a tied weight on the last stage may have no separate entry; then it is the embedding.
        """
        found, stage = self._name_and_stage(name)
        for run in runs(self.table[found], start, start + len(out), (tp, tp_rank), self._written.tp):
            device = self._device(stage * self._written.tp + run.tp_rank)
            device.read(found, key, run.start, out[run.at : run.at + run.length])

    def _states_of_group(self, name: str) -> dict[str, Any]:
        """The states on one HDP rank of the group of a parameter."""
        found, stage = self._name_and_stage(name)
        return self._device_of_stage(stage).group_of(found)

    def _name_and_stage(self, name: str) -> tuple[str, int]:
        """Return the name of a parameter in the checkpoint, and its stage. Raises KeyError if it is in none."""
        for found in (name, _TIED.get(name, name)):
            for stage in self._stages:
                if found in self._device_of_stage(stage).names:
                    return found, stage
        raise KeyError(name)

    def _device_of_stage(self, stage: int) -> _Device:
        """A device of a stage."""
        return self._device(stage * self._written.tp + self._tp_rank)

    def _device(self, number: int) -> _Device:
        if number not in self._opened:
            self._opened[number] = _Device(self._files, number, self.table, self._own)
        return self._opened[number]


def model_weights(checkpoint: Path, table: Parameters) -> Weights:
    """Return the weights and buffers of a checkpoint by name: in the run's dtype, or in fp32 under ZeRO-3.

    `table` has the parameters of the model. Tensors are read when their functions are called.
    """
    files = _Files(checkpoint)
    if not files.has_weights():
        saved = SavedStates(checkpoint, table)
        return {
            **{name: partial(saved.buffers.__getitem__, name) for name in saved.buffers},
            **master_weights(checkpoint, table),
        }
    written, found = _written(files.model_states(0)), dict[str, Callable[[], Tensor]]()
    # With expert parallelism a file has the experts of one rank only. The master weights of all ranks have the others.
    masters = master_weights(checkpoint, table) if written.ep > 1 else {}
    for stage in range(written.pp):
        slices = [files.model_states(stage * written.tp + rank)["module"] for rank in range(written.tp)]
        for name in slices[0]:
            if written.ep > 1 and name in table and table[name].stacked:  # the file has the share of one rank
                found[name] = partial(_rounded, masters[name], slices[0][name].dtype)
            found.setdefault(name, partial(_joined, name, slices, table))
    return found


def _rounded(master: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
    """The weight that an update copies from a master weight."""
    return master().to(dtype)


def _joined(name: str, slices: Sequence[Mapping[str, Tensor]], table: Parameters) -> Tensor:
    """Join the slices of a tensor, without what pads the vocabulary."""
    dim = dim_of(table, name)
    if dim is None or len(slices) == 1:
        return slices[0][name]
    return torch.cat([of_device[name] for of_device in slices], dim).narrow(dim, 0, table[name].shape[dim])


def master_weights(checkpoint: Path, table: Parameters) -> Weights:
    """Return the fp32 master weights of a checkpoint by name, joined from the files of all ranks."""
    saved = SavedStates(checkpoint, table)

    @lru_cache(maxsize=1)  # the experts of a stacked parameter are read one after another
    def joined(name: str) -> Tensor:
        whole = torch.empty(saved.shapes[name].numel())
        saved.read(name, MASTER, 0, whole)
        return whole.view(saved.shapes[name])

    return {name: partial(joined, name) for name in saved.shapes}


def _written(model: Mapping[str, Any]) -> Written:
    """Return the mesh that wrote a checkpoint, from the model states of one of its devices."""
    return Written(**model.get(_MESH, {}))


def _load(file: Path | BinaryIO, path: Path) -> dict[str, Any]:
    """Load objects to the CPU, memory-mapped from a file of PyTorch; `path` is that of the file, for messages.

    Raises CheckpointError for objects of classes other than PyTorch's and `_CLASSES`, which could run code.
    """
    try:
        with torch.serialization.safe_globals(_CLASSES):
            states: dict[str, Any] = torch.load(
                file, map_location="cpu", mmap=isinstance(file, Path), weights_only=True
            )
    except UnpicklingError as error:
        message = f"contains objects that are not tensors: {str(error).strip().splitlines()[-1]}"
        raise CheckpointError(message, key=str(path), hint="use a checkpoint that ByteScale has written") from error
    return states
