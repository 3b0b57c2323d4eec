"""PyTorch's fused kernel for CPU: neighbours of one length are a batch, others are called one by one.

It must never see an empty side: that kills the process. Letters: N sequences of a batch, T query tokens of each,
H query heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor

from engine.attention.kernels.call import Call, Functions, wide


def load() -> Functions:
    """Return the kernel's functions. bf16 is computed and returned in float32."""
    return Functions(_forward, _backward)


def _forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    q, k, v = map(wide, (q, k, v))
    parts = [
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(_batched(x, count) for x in (q[rows], k[keys], v[keys])), 0.0, call.causal
        )
        for count, rows, keys in _batches(call)
    ]
    return _joined([out for out, _ in parts], q), _joined([lse for _, lse in parts], q[..., 0])


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, k, v, out = map(wide, (dout, q, k, v, out))
    parts = []
    for count, rows, keys in _batches(call):
        inputs = (dout[rows], q[rows], k[keys], v[keys], out[rows], lse[rows])
        parts.append(
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(_batched(x, count) for x in inputs), 0.0, call.causal
            )
        )
    dq, dk, dv = (_joined([part[number] for part in parts], x) for number, x in enumerate((q, k, v)))
    return dq, dk, dv


def _batches(call: Call) -> Iterator[tuple[int, slice, slice]]:
    """Yield neighbours of one length: how many there are, and the rows of their queries and keys."""
    for _, same in groupby(call.sequences(), key=lambda pair: tuple(rows.stop - rows.start for rows in pair)):
        pairs = list(same)
        (first_rows, first_keys), (last_rows, last_keys) = pairs[0], pairs[-1]
        yield len(pairs), slice(first_rows.start, last_rows.stop), slice(first_keys.start, last_keys.stop)


def _batched(x: Tensor, count: int) -> Tensor:
    """Return [N*T,H,D] as the [N,H,T,D] that PyTorch's kernel takes, and [N*T,H] as [N,H,T], without a copy."""
    return x.view(count, -1, *x.shape[1:]).transpose(1, 2)


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    """Return what the kernel gave for each batch, [N,H,T,D] or [N,H,T], as packed rows: a copy if there are more."""
    rows = [part.transpose(1, 2).flatten(0, 1) for part in parts]
    return rows[0] if len(rows) == 1 else torch.cat(rows) if rows else torch.empty_like(like)
