"""Copies the states that DeepSpeed saves to host memory, so that they can be written while training continues."""

from __future__ import annotations

import copy
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from torch import Tensor

from engine.cluster.available_memory import available_bytes
from engine.fit.host import copy_limit
from engine.offload.pinned import allocate

_ALIGN = 64  # bytes
_PIECE = 1 << 26  # bytes of one write


class Snapshot(TorchCheckpointEngine):
    """Takes the states of a checkpoint from DeepSpeed, and keeps copies in host memory instead of writing them.

    The memory is kept for the next checkpoint: it is allocated, and its pages are touched, once. If the host has too
    little for all of its ranks, the states stay where they are, and must be written before they change.
    """

    def __init__(self, device: torch.device, ranks_of_host: int) -> None:
        super().__init__()
        self.copies = True  # whether to copy the states, if the host has the memory
        self.short = 0  # bytes for which the host had no memory at the last checkpoint
        self._device, self._ranks_of_host = device, ranks_of_host
        self._files: dict[str, Any] = {}
        self._memory: dict[str, Tensor] = {}
        self._reserving: Thread | None = None

    def create(self, info: object) -> None:
        """Begin a checkpoint."""
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None
        self._files, self.short = {}, 0

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Create no folder: `write` does."""

    def save(self, state_dict: dict[str, Any], path: str) -> None:
        """Copy the states of a file. `path` is relative to the checkpoint's folder."""
        name = os.path.normpath(path)
        if not self.copies:
            self._files[name] = state_dict
            return
        tensors = _distinct(state_dict)
        size = _size(tensors)
        memory = self._allocate(name, size)
        if memory is None:
            self._files[name] = state_dict
            self.short += size
            return
        raw, at, copies = memory.numpy(), 0, {}
        with torch.no_grad():
            for identity, tensor in tensors.items():
                # Each copy gets a separate storage, because torch.save writes whole storages.
                held = raw[at : at + tensor.nbytes]
                flat = torch.frombuffer(held, dtype=tensor.dtype) if len(held) else torch.empty(0, dtype=tensor.dtype)
                copies[identity] = flat.view(tensor.shape).copy_(tensor, non_blocking=True)
                at += _aligned(tensor)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._files[name] = _replaced(state_dict, lambda tensor: copies[_identity(tensor)])

    def reserve(self) -> None:
        """Allocate the memory for the states that were saved without copies, in another thread, and drop the states.

        The next checkpoint waits for that thread, and then needs only the time of the copy.
        """
        sizes = {name: _size(_distinct(states)) for name, states in self._files.items()}
        self._files = {}

        def allocate_all() -> None:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a new thread would pin the memory through the first GPU
            with suppress(RuntimeError):  # `save` tries again, and raises
                for name, size in sizes.items():
                    memory = self._allocate(name, size)
                    if memory is not None and self._device.type == "cpu":
                        memory.zero_()  # the system gives memory when it is first written to

        self._reserving = Thread(target=allocate_all, name="reserve-snapshot")
        self._reserving.start()

    def _allocate(self, name: str, size: int) -> Tensor | None:
        """Return uint8 [>= size] of host memory for a file; None if the host has too little."""
        memory = self._memory.get(name)
        if memory is not None and len(memory) >= size:
            return memory
        self._memory.pop(name, None)
        available = available_bytes()
        if available is not None and size > copy_limit(available, self._ranks_of_host):
            return None
        memory = self._memory[name] = allocate(size, self._device)
        return memory

    def write_each(self, folder: Path) -> Iterator[str]:
        """Write the states of this rank into `folder`, file by file, and yield each path before that file is written.

        May run in another thread.
        """
        for name in list(self._files):
            yield name
            states = self._files.pop(name)  # without a copy, DeepSpeed has cloned some of them on the device
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb", buffering=0) as file:
                pieces: Any = _Pieces(file.write)
                torch.save(states, pieces)


class _Pieces:
    """A file for torch.save. While it writes to a path, PyTorch holds the GIL, and training would wait."""

    def __init__(self, write: Callable[[memoryview], int | None]) -> None:
        self._write = write

    def write(self, data: Any) -> int:
        """Write all of `data`; one call of the system may write less."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            done += self._write(view[done : done + _PIECE]) or 0
        return done

    def flush(self) -> None:
        """Do nothing: the file has no buffer."""


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """A key that is equal for two tensors with the same elements at the same place."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _distinct(states: dict[str, Any]) -> dict[tuple[Any, ...], Tensor]:
    return {_identity(tensor): tensor for tensor in _tensors(states)}


def _size(tensors: dict[tuple[Any, ...], Tensor]) -> int:
    return sum(_aligned(tensor) for tensor in tensors.values())


def _aligned(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGN) * _ALIGN


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers."""
    if isinstance(value, Tensor):
        yield value
    elif type(value) in (dict, OrderedDict):
        for inner in value.values():
            yield from _tensors(inner)
    elif type(value) in (list, tuple):
        for inner in value:
            yield from _tensors(inner)


def _replaced(value: Any, replace: Callable[[Tensor], Tensor]) -> Any:
    """Copy nested containers and all objects in them, with each tensor replaced."""
    if isinstance(value, Tensor):
        return replace(value)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _replaced(inner, replace)) for key, inner in value.items())
    if type(value) in (list, tuple):
        return type(value)(_replaced(inner, replace) for inner in value)
    return copy.deepcopy(value)
