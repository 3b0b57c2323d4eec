"""PyTorch's fused attention kernel for CPUs. Adjacent sequences of equal length are computed in one call.

Never pass empty queries or keys to it: they kill the process (SIGFPE).

Letters: N sequences of a batch, T query tokens of each, H query heads, D head size.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.kernels.call import Call, Functions, wide


def load() -> Functions:
    """Return the functions of PyTorch's fused CPU kernel. For bf16 inputs they compute and return float32."""
    return Functions(_forward, _backward)


def _forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    q, k, v = map(wide, (q, k, v))
    batches = _batches(call)
    queries, keys = [batch.queries for batch in batches], [batch.keys for batch in batches]
    parts = [
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*inputs, 0.0, call.causal)
        for inputs in zip(_cut(q, queries), _cut(k, keys), _cut(v, keys), strict=True)
    ]
    return _joined([out for out, _ in parts], q), _joined([lse for _, lse in parts], q[..., 0])


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, k, v, out = map(wide, (dout, q, k, v, out))
    batches = _batches(call)
    queries, keys = [batch.queries for batch in batches], [batch.keys for batch in batches]
    owners = ((dout, queries), (q, queries), (k, keys), (v, keys), (out, queries), (lse, queries))
    parts = [
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, 0.0, call.causal)
        for inputs in zip(*(_cut(x, of) for x, of in owners), strict=True)
    ]
    dq, dk, dv = (_joined([part[number] for part in parts], x) for number, x in enumerate((q, k, v)))
    return dq, dk, dv


class _Batch(NamedTuple):
    """Adjacent sequences with equal numbers of queries and equal numbers of keys: (sequences, tokens of each)."""

    queries: tuple[int, int]
    keys: tuple[int, int]


@lru_cache(maxsize=64)
def _batches(call: Call) -> tuple[_Batch, ...]:
    """Group the sequences of a call into batches. Cached, because all layers of a micro-batch make the same calls."""
    sizes = ((rows.stop - rows.start, keys.stop - keys.start) for rows, keys in call.sequences())
    counted = ((size, len(list(same))) for size, same in groupby(sizes))
    return tuple(_Batch((count, queries), (count, keys)) for (queries, keys), count in counted)


def _cut(x: Tensor, batches: list[tuple[int, int]]) -> list[Tensor]:
    """View packed rows, [T,H,D] or [T,H], as one tensor per batch, [N,H,T,D] or [N,H,T]."""
    parts = x.transpose(0, 1).split([count * tokens for count, tokens in batches], dim=1)
    return [
        part[None] if count == 1 else part.unflatten(1, (count, tokens)).transpose(0, 1)
        for part, (count, tokens) in zip(parts, batches, strict=True)
    ]


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    """Convert the results of all batches, [N,H,T,D] or [N,H,T], to packed rows. Copies if there are several batches.

    Without batches, the result is empty and has the shape of `like`.
    """
    rows = [part.transpose(1, 2).flatten(0, 1) for part in parts]
    return rows[0] if len(rows) == 1 else torch.cat(rows) if rows else torch.empty_like(like)
