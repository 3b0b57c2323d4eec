"""Counts the bytes that a rank hands to collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Counted(TorchDispatchMode):
    """Counts the bytes of collectives: of an all-gather or reduce-scatter the whole tensor, of an all-reduce twice.

    On CPUs stages 1 and 2 exchange parts in place of a reduce-scatter, which moves as much.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("c10d.").partition(".")[0]
        if str(func).startswith("c10d."):
            kind = next((kind for kind in ("allreduce", "allgather", "reduce_scatter") if kind in name), name)
            self.bytes[kind] += (2 if kind == "allreduce" else 1) * max(map(size, args))
        return func(*args, **(kwargs or {}))


def size(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(size, value)) if isinstance(value, list | tuple) else 0


def counted(work: Callable[[], object]) -> Counter[str]:
    with Counted() as found:
        work()
    return found.bytes
