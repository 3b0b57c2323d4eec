"""Copies from the host to a GPU, recorded on a machine without one."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor


class Copy(NamedTuple):
    """A copy to a GPU. The host does not wait for it if the source is pinned and the copy is non-blocking."""

    values: list[int]
    pinned: bool
    non_blocking: bool


def recorded_copies(monkeypatch: pytest.MonkeyPatch) -> list[Copy]:
    """Let `pin_memory` and `to` of tensors work without a GPU: results stay on the host. Returns the list of copies
    to GPUs, in which later ones are recorded."""
    copies: list[Copy] = []
    pinned = set[int]()  # addresses
    kept: list[Tensor] = []  # as long as the test runs, so that no address is used again
    plain: Any = Tensor.to

    def pin_memory(tensor: Tensor) -> Tensor:
        kept.append(tensor.clone())
        pinned.add(kept[-1].data_ptr())
        return kept[-1]

    def to(tensor: Tensor, *arguments: Any, non_blocking: bool = False, **more: Any) -> Tensor:
        if torch.device("cuda") not in (*arguments, *more.values()):
            return plain(tensor, *arguments, non_blocking=non_blocking, **more)
        copies.append(Copy(tensor.tolist(), tensor.data_ptr() in pinned, non_blocking))
        return tensor

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(Tensor, "to", to)
    return copies
