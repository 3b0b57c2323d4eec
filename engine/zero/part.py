"""The part of a rank in the file of its node: what it has saved, as bytes that are memory-mapped again.

```
 length of the objects, 8 bytes, little endian
 the objects: saved by torch.save, each tensor replaced by where it is, and its dtype and shape
 the tensors, at multiples of 64 bytes; their places are counted from the beginning of the part
 zeros, up to a multiple of 4096 bytes: so no page of the file has bytes of two ranks
```
Not a file of torch.save: its size is known only when it is written, but the ranks of a node must agree on the offsets
of their parts before; and torch.load maps whole files only. Objects are loaded as in states.py: they can run no code.
"""

from __future__ import annotations

import io
import math
import mmap
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

_ALIGN = 64  # bytes
_END = 4096  # bytes
_LENGTH = 8  # bytes of the length of the objects
_AT = "tensor at"  # the only key of what takes the place of a tensor
Load = Callable[[Any], Any]  # from a path or an open file


class Encoded:
    """The part of a rank, ready to be written; `size` is its length in bytes. It refers to the tensors."""

    def __init__(self, states: dict[str, Any]) -> None:
        """`states` are nested dicts, lists and tuples, by name. What refers to the same elements is written once."""
        tensors = distinct(states)
        at, places = 0, dict[tuple[Any, ...], dict[str, Any]]()
        for key, tensor in tensors.items():
            places[key] = {_AT: (at, tensor.dtype, tuple(tensor.shape))}
            at += aligned(tensor.nbytes)
        buffer = io.BytesIO()
        # The beginning of the tensors depends on the length of the objects: readers add it.
        torch.save(replaced(states, lambda tensor: places[identity(tensor)]), buffer)
        objects = buffer.getvalue()
        self._head = len(objects).to_bytes(_LENGTH, "little") + objects
        self._head += bytes(aligned(len(self._head)) - len(self._head))
        self._tensors = deque(tensors.values())
        self._end = -(len(self._head) + at) % _END
        self.size = len(self._head) + at + self._end

    def pieces(self) -> Iterator[memoryview]:
        """Yield the bytes of the part in order, once. Releases each tensor when it is taken.

        Without copies they may be on a GPU.
        """
        yield memoryview(self._head)
        while self._tensors:
            tensor = self._tensors.popleft().detach().cpu().contiguous()
            raw: Any = tensor.reshape(-1).view(torch.uint8).numpy()
            yield memoryview(raw)
            yield memoryview(bytes(-tensor.nbytes % _ALIGN))
        yield memoryview(bytes(self._end))


def read(path: Path, start: int, stop: int, load: Load) -> dict[str, Any]:
    """Return the states of the part in bytes start .. stop - 1 of a file; their tensors are memory-mapped.

    `load` loads the objects from an open file. Raises ValueError if the bytes are no part.
    """
    with path.open("rb") as file:
        begin = start - start % mmap.ALLOCATIONGRANULARITY
        # A private mapping that could be written to: PyTorch has no tensors that cannot.
        mapped = mmap.mmap(file.fileno(), stop - begin, access=mmap.ACCESS_COPY, offset=begin)
    part = memoryview(mapped)[start - begin :]
    length = int.from_bytes(part[:_LENGTH], "little")
    first = aligned(_LENGTH + length)
    if not length or first > len(part):
        raise ValueError(f"{path} has no part of a rank at byte {start}")
    objects: BinaryIO = io.BytesIO(part[_LENGTH : _LENGTH + length])
    made = dict[tuple[Any, ...], Tensor]()

    def filled(value: Any) -> Any:
        if type(value) is dict and value.keys() == {_AT}:
            at, dtype, shape = place = value[_AT]
            if place not in made:  # what was one tensor stays one
                count = math.prod(shape)
                of_file = torch.frombuffer(part, dtype=dtype, count=count, offset=first + at) if count else None
                made[place] = torch.empty(shape, dtype=dtype) if of_file is None else of_file.view(shape)
            return made[place]
        return _container(value, filled)

    states: dict[str, Any] = filled(load(objects))
    return states


def identity(tensor: Tensor) -> tuple[Any, ...]:
    """A key that is equal for two tensors with the same elements at the same place."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def aligned(size: int) -> int:
    """The bytes that `size` bytes take: a multiple of 64."""
    return -(-size // _ALIGN) * _ALIGN


def distinct(states: Any) -> dict[tuple[Any, ...], Tensor]:
    """Return the tensors in nested containers by `identity`, in their order."""
    found = dict[tuple[Any, ...], Tensor]()
    replaced(states, lambda tensor: found.setdefault(identity(tensor), tensor))
    return found


def replaced(value: Any, replace: Callable[[Tensor], Any], other: Callable[[Any], Any] = lambda value: value) -> Any:
    """Copy nested containers, with each tensor replaced by `replace(tensor)`, and each other object by `other(it)`."""
    if isinstance(value, Tensor):
        return replace(value)
    return _container(value, lambda inner: replaced(inner, replace, other), other)


def _container(value: Any, convert: Callable[[Any], Any], other: Callable[[Any], Any] = lambda value: value) -> Any:
    """Copy a container with each value converted; anything else becomes `other(value)`."""
    if type(value) in (dict, OrderedDict):
        return type(value)((key, convert(inner)) for key, inner in value.items())
    if type(value) in (list, tuple):
        return type(value)(convert(inner) for inner in value)
    return other(value)
