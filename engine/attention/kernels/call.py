"""The interface of attention kernels. The forward pass returns the output and the log-sum-exp of packed sequences,
the backward pass the gradients of q, k and v.

Letters: T query tokens, S key tokens, H query heads, G key and value heads (G divides H), D head size.
Sequence i of a call has the queries q_bounds[i]:q_bounds[i + 1] and the keys kv_bounds[i]:kv_bounds[i + 1] (Python
slices), none of them empty.

Note: [what is rounded]. A kernel does not cast its results: the CPU kernel and the reference return at least float32,
GPU kernels return the dtype of their inputs (their float32 sums are not accessible). Rings merge and add blocks in the
wider dtype in both cases. So the results of a block are rounded at most once, by the kernel.
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
    """Which queries attend to which keys. `q_bounds` and `kv_bounds` are cumulative lengths that start at 0.

    If `causal`, query i of a sequence attends to its keys 0 .. i only; otherwise to all keys of the sequence. If
    `overlapped`, ring transfers run at the same time, and a kernel may leave some of the GPU to them.
    """

    q_bounds: tuple[int, ...]
    kv_bounds: tuple[int, ...]
    causal: bool
    overlapped: bool = False

    def sequences(self) -> Iterator[tuple[slice, slice]]:
        """Yield, for each sequence, its rows of the queries and its rows of the keys."""
        for rows, keys in zip(pairwise(self.q_bounds), pairwise(self.kv_bounds), strict=True):
            yield slice(*rows), slice(*keys)


Forward = Callable[[Tensor, Tensor, Tensor, Call], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Call], tuple[Tensor, Tensor, Tensor]]


class Functions(NamedTuple):
    """The two functions of a kernel.

    `forward(q [T,H,D], k [S,G,D], v [S,G,D], call)` returns the output [T,H,D] and the log-sum-exp [T,H];
    `backward(dout, q, k, v, out, lse, call)` returns dq, dk, dv. If `out` and `lse` are the result of attention over
    more keys than those of the call, the gradients are the contribution of the call's keys only.
    """

    forward: Forward
    backward: Backward


def blend(out: Tensor, part_out: Tensor, weight: Tensor) -> None:
    """Move `out` [T,H,D] towards `part_out`, in place, by the fraction `weight` [T,H]."""
    out.lerp_(part_out.to(out.dtype), weight[..., None])


Blend = Callable[[Tensor, Tensor, Tensor], None]


def merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor, blend: Blend = blend) -> None:
    """Merge the result of a ring's block into `out` [T,H,D] and `lse` [T,H] of the same queries, in place.

    Attention over the keys A and B together follows from attention over A and over B (online softmax; Milakov and
    Gimelshein 2018):
        out = (exp(lse_A) out_A + exp(lse_B) out_B) / (exp(lse_A) + exp(lse_B))
    This form overflows. The stable form, in one pass over the rows, is
        out = out_A + sigmoid(lse_B - lse_A) (out_B - out_A)
    `blend` computes the last line. It may be a compiled form of the function above, so `weight` is contiguous whatever
    the layout of `lse`.
    """
    weight = torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
    torch.sub(part_lse, lse, out=weight)
    blend(out, part_out, weight.sigmoid_())
    lse.copy_(torch.logaddexp(lse, part_lse))


Merge = Callable[[Tensor, Tensor, Tensor, Tensor], None]


@dataclass(frozen=True)
class Kernel:
    """A selected kernel, why it was selected, and why the kernels before it in the list were not ("name: reason").

    `merge` merges the kernel's results for the blocks of a ring; parts of it may be compiled.
    """

    name: str
    reason: str
    forward: Forward
    backward: Backward
    rejected: tuple[str, ...] = ()
    merge: Merge = merge


class Packed(NamedTuple):
    """Cumulative sequence lengths in the form that GPU kernels expect."""

    cu_seqlens: Tensor  # int32, on the device
    longest: int  # tokens of the longest sequence


@lru_cache(maxsize=1024)
def packed(bounds: tuple[int, ...], device: torch.device) -> Packed:
    """Copy the bounds of at least one sequence to a device. Cached, so all layers of a micro-batch share one copy.

    Copies from pinned memory, so that the host does not wait for the device.
    """
    on_host = torch.tensor(bounds, dtype=torch.int32, pin_memory=device.type == "cuda")
    return Packed(on_host.to(device, non_blocking=True), max(stop - start for start, stop in pairwise(bounds)))


def wide(x: Tensor) -> Tensor:
    """Return x, contiguous and in at least float32: PyTorch's CPU kernel (2.13) is wrong for non-contiguous heads."""
    return x.to(wider(x.dtype)).contiguous()


def contiguous_heads(x: Tensor) -> Tensor:
    """Return x with stride 1 in its last dimension, as GPU kernels require; copies only if necessary."""
    return x if x.stride(-1) == 1 else x.contiguous()
