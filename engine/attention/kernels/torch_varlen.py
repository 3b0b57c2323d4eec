"""PyTorch's own attention kernel for packed sequences: the flash-attn 2 in its CUDA builds (2.11 to 2.13)."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.kernels.call import Call, Functions, Packed
from engine.attention.kernels.varlen import Library


def load() -> Functions:
    """Return the functions of PyTorch's varlen kernel."""
    return Library(_attend, _derive).functions()


def _attend(q: Tensor, k: Tensor, v: Tensor, queries: Packed, keys: Packed, call: Call) -> tuple[Tensor, Tensor]:
    bounds = (queries.cu_seqlens, keys.cu_seqlens, queries.longest, keys.longest)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *bounds, 0.0, call.causal, False)
    return out, lse


def _derive(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    queries: Packed,
    keys: Packed,
    call: Call,
) -> tuple[Tensor, Tensor, Tensor]:
    bounds = (queries.cu_seqlens, keys.cu_seqlens, queries.longest, keys.longest)
    seed, unused = q.new_empty(2, dtype=torch.uint64), q.new_empty(0)  # arguments of dropout, which is not used
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        dout, q, k, v, out, lse, *bounds, 0.0, call.causal, seed, unused
    )
    return gradients
