"""PyTorch's fused kernel for CPU, one sequence at a time. It must never see an empty side: that kills the process.

Letters: T query tokens, H query heads, D head size.
"""

from __future__ import annotations

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
            _batched(q[rows]), _batched(k[keys]), _batched(v[keys]), 0.0, call.causal
        )
        for rows, keys in call.sequences()
    ]
    return _joined([out for out, _ in parts], q), _joined([lse for _, lse in parts], q[..., 0])


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, k, v, out = map(wide, (dout, q, k, v, out))
    parts = [
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(_batched(x) for x in (dout[rows], q[rows], k[keys], v[keys], out[rows], lse[rows])), 0.0, call.causal
        )
        for rows, keys in call.sequences()
    ]
    dq, dk, dv = (_joined([part[number] for part in parts], x) for number, x in enumerate((q, k, v)))
    return dq, dk, dv


def _batched(x: Tensor) -> Tensor:
    """Return [T,H,D] as the [1,H,T,D] that PyTorch's kernel takes, and [T,H] as [1,H,T], without a copy."""
    return x.transpose(0, 1)[None]


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    """Return what the kernel gave for each sequence, [1,H,T,D] or [1,H,T], as packed rows: a copy if there are more."""
    rows = [part[0].transpose(0, 1) for part in parts]
    return rows[0] if len(rows) == 1 else torch.cat(rows) if rows else torch.empty_like(like)
