"""Copies the states that DeepSpeed saves to host memory, so that they can be written while training continues."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from torch import Tensor

from engine.cluster.available_memory import available_bytes
from engine.control import progress
from engine.fit.host import copy_limit
from engine.offload.pinned import allocate
from engine.run.checkpoints import Range, Share
from engine.zero.part import Encoded, aligned, distinct, identity, replaced

_PIECE = 1 << 26  # bytes of one write
FILE = "zero/ranks-{:05d}-{:05d}.states"  # of a node, by its first and last rank


class Snapshot(TorchCheckpointEngine):
    """Takes the states of a checkpoint from DeepSpeed, and keeps copies in host memory instead of writing them.

    Later they are written into one file of the node, by the names that DeepSpeed would give its files.

    The memory is kept for the next checkpoint: it is allocated, and its pages are touched, once. If the host has too
    little for all of its ranks, the states stay where they are, and must be written before they change.
    """

    def __init__(self, device: torch.device, ranks_of_host: int, rank: int) -> None:
        super().__init__()
        self.copies = True  # whether to copy the states, if the host has the memory
        self.short = 0  # bytes for which the host had no memory at the last checkpoint
        self._device, self._ranks_of_host, self._rank = device, ranks_of_host, rank
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
        tensors = distinct(state_dict)
        size = _size(tensors)
        memory = self._allocate(name, size)
        if memory is None:
            self._files[name] = state_dict
            self.short += size
            return
        raw, at, copies = memory.numpy(), 0, {}
        with torch.no_grad():
            for key, tensor in tensors.items():
                held = raw[at : at + tensor.nbytes]
                flat = torch.frombuffer(held, dtype=tensor.dtype) if len(held) else torch.empty(0, dtype=tensor.dtype)
                copies[key] = flat.view(tensor.shape).copy_(tensor, non_blocking=True)
                at += aligned(tensor.nbytes)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._files[name] = replaced(state_dict, lambda tensor: copies[identity(tensor)], copy.deepcopy)

    def reserve(self) -> None:
        """Allocate the memory for the states that were saved without copies, in another thread, and drop the states.

        The next checkpoint waits for that thread, and then needs only the time of the copy.
        """
        sizes = {name: _size(distinct(states)) for name, states in self._files.items()}
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

    def write_each(self, folder: Path, share: Share) -> Iterator[Range]:
        """Write the states of this rank into its node's file in `folder`.

        The ranks of the node exchange the sizes of their parts with `share`; each writes its part after those of lower
        ranks. Yields the range of bytes of this part before it writes them. May run in another thread.
        """
        part = Encoded(self._files)
        self._files = {}  # without a copy, DeepSpeed has cloned some of them on the device
        sizes = share(part.size)
        start = sum(size for rank, size in sizes.items() if rank < self._rank)
        name = FILE.format(min(sizes), max(sizes))
        yield Range(name, start, start + part.size)
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        with os.fdopen(handle, "wb", buffering=0) as file:
            file.seek(start)
            for number, piece in enumerate(part.pieces()):
                write_all(file.write, piece)  # without the GIL, which training needs
                if number == 0:
                    progress.reach("write")


def write_all(write: Callable[[memoryview], int | None], data: memoryview) -> None:
    """Write all of `data`; one call of the system may write less."""
    done = 0
    while done < len(data):
        done += write(data[done : done + _PIECE]) or 0


def _size(tensors: Mapping[Any, Tensor]) -> int:
    return sum(aligned(tensor.nbytes) for tensor in tensors.values())
