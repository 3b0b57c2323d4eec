"""The one seam for attention kernels: packed sequences in, output and log-sum-exp out; and the gradients.

Letters: T query tokens, S key tokens, H query heads, G key and value heads (G divides H), D head size.
Sequence i of a call has queries q_bounds[i] .. q_bounds[i + 1] and keys kv_bounds[i] .. kv_bounds[i + 1], never empty.

Note: [what is rounded]. A kernel returns its results in the dtype in which it has them: the CPU kernel and the
reference at least float32, GPU kernels that of their inputs (none of them writes its fp32 sums). A ring merges and adds
in the wider dtype either way, so a block's results are rounded once, before they are merged, and never on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from engine.dtypes import wider


class Call(NamedTuple):
    """The bounds of a packed call, and whether query i of a sequence sees only keys up to i."""

    q_bounds: tuple[int, ...]
    kv_bounds: tuple[int, ...]
    causal: bool

    def sequences(self) -> Iterator[tuple[slice, slice]]:
        """Yield the rows of each sequence's queries and keys."""
        for rows, keys in zip(pairwise(self.q_bounds), pairwise(self.kv_bounds), strict=True):
            yield slice(*rows), slice(*keys)


Forward = Callable[[Tensor, Tensor, Tensor, Call], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Call], tuple[Tensor, Tensor, Tensor]]


class Functions(NamedTuple):
    """What a kernel computes.

    `forward(q [T,H,D], k [S,G,D], v [S,G,D], call)` returns the output [T,H,D] and the log-sum-exp [T,H];
    `backward(dout, q, k, v, out, lse, call)` returns dq, dk, dv. `out` and `lse` may be those of a larger attention
    that the call's keys are a part of: then the gradients are this part's share of it.
    """

    forward: Forward
    backward: Backward


@dataclass(frozen=True)
class Kernel:
    """A kernel, why it was chosen, and why not those before it: a line each, "name: reason"."""

    name: str
    reason: str
    forward: Forward
    backward: Backward
    passed_over: tuple[str, ...] = ()


class Packed(NamedTuple):
    """Bounds as GPU kernels take them."""

    cu_seqlens: Tensor  # int32, on the device
    longest: int  # tokens of the longest sequence


@lru_cache(maxsize=1024)
def packed(bounds: tuple[int, ...], device: torch.device) -> Packed:
    """Return the bounds on a device. All layers of a micro-batch ask for the same ones: they are copied there once.

    The copy comes from pinned memory, so the host does not wait for the device.
    """
    on_host = torch.tensor(bounds, dtype=torch.int32, pin_memory=device.type == "cuda")
    return Packed(on_host.to(device, non_blocking=True), max(stop - start for start, stop in pairwise(bounds)))


def wide(x: Tensor) -> Tensor:
    """Return x in the wider dtype, contiguous: PyTorch's CPU kernel (2.13) returns wrong results for strided heads."""
    return x.to(wider(x.dtype)).contiguous()


def contiguous_heads(x: Tensor) -> Tensor:
    """Return x as GPU kernels take it: elements of a head lie side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()
