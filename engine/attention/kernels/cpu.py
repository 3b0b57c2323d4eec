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
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2])
    for rows, keys in call.sequences():
        part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _batched(q[rows]), _batched(k[keys]), _batched(v[keys]), 0.0, call.causal
        )
        out[rows], lse[rows] = (x[0].transpose(0, 1) for x in part)
    return out, lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, k, v, out = map(wide, (dout, q, k, v, out))
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for rows, keys in call.sequences():
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(_batched(x) for x in (dout[rows], q[rows], k[keys], v[keys], out[rows])),
            lse[rows].transpose(0, 1)[None],
            0.0,
            call.causal,
        )
        dq[rows], dk[keys], dv[keys] = (g[0].transpose(0, 1) for g in gradients)
    return dq, dk, dv


def _batched(x: Tensor) -> Tensor:
    """Return [T,H,D] as the [1,H,T,D] that PyTorch's kernel takes, without a copy."""
    return x.transpose(0, 1)[None]
