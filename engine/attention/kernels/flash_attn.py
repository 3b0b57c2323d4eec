"""The flash-attn packages: 2 (`flash_attn`), 3 (`flash_attn_interface`), 4 (`flash_attn.cute`).

The backward pass of a ring passes a merged output and log-sum-exp to the kernel. The public functions of these packages
do not allow that, because autograd calls their backward pass. So this module calls the lower-level functions, as
PyTorch's own integration of versions 3 and 4 does. All of them return out, dq, dk and dv in the dtype of their inputs;
their float32 sums are not accessible.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from engine.attention.kernels.call import Call, Functions, Packed
from engine.attention.kernels.varlen import Library
from engine.cluster.communicators import TRANSFER_SMS


def load_2() -> Functions:
    """Return the functions of flash-attn 2 (2.7 or newer). Raises ImportError if it is not installed."""
    module = import_module("flash_attn.flash_attn_interface")

    def attend(q: Tensor, k: Tensor, v: Tensor, queries: Packed, keys: Packed, call: Call) -> tuple[Tensor, Tensor]:
        out, lse, *_ = module._flash_attn_varlen_forward(
            q, k, v, **_bounds(queries, keys), dropout_p=0.0, softmax_scale=_scale(q), causal=call.causal
        )
        return out, lse

    def derive(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        *tensors, queries, keys, call = inputs
        gradients = _like(tensors)
        module._flash_attn_varlen_backward(
            *tensors,
            *gradients,
            **_bounds(queries, keys),
            dropout_p=0.0,
            softmax_scale=_scale(tensors[1]),
            causal=call.causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=False,
        )
        return gradients

    return Library(attend, derive).functions()


def load_3() -> Functions:
    """Return the functions of flash-attn 3. Raises ImportError if it is not installed.

    Its kernels are persistent: they would keep all SMs until they end, so that NCCL's could not start beside them.
    """
    import_module("flash_attn_interface")  # registers the operators
    operators = torch.ops.flash_attn_3

    def attend(q: Tensor, k: Tensor, v: Tensor, queries: Packed, keys: Packed, call: Call) -> tuple[Tensor, Tensor]:
        # `num_splits=1`, as in the package's training functions: the default of the operator may split the keys of a
        # query.
        out, lse, *_ = operators.fwd(
            q,
            k,
            v,
            **_bounds(queries, keys),
            softmax_scale=_scale(q),
            is_causal=call.causal,
            num_splits=1,
            sm_margin=_sm_margin(call),
        )
        return out, lse

    def derive(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        *tensors, queries, keys, call = inputs
        gradients = _like(tensors)
        # The operator writes the gradients into tensors that the caller allocates.
        operators.bwd(
            *tensors,
            *gradients,
            **_bounds(queries, keys),
            softmax_scale=_scale(tensors[1]),
            is_causal=call.causal,
            sm_margin=_sm_margin(call),
        )
        return gradients

    return Library(attend, derive).functions()


def load_4() -> Functions:
    """Return the functions of flash-attn 4. Raises ImportError if it is not installed."""
    module = import_module("flash_attn.cute.interface")

    def attend(q: Tensor, k: Tensor, v: Tensor, queries: Packed, keys: Packed, call: Call) -> tuple[Tensor, Tensor]:
        out, lse, *_ = module._flash_attn_fwd(
            q, k, v, **_bounds(queries, keys), softmax_scale=_scale(q), causal=call.causal, return_lse=True
        )
        return out, lse

    def derive(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, lse, queries, keys, call = inputs
        # Without `max_seqlen_*`, as PyTorch calls it: kernels read the bounds. With them the grid would be smaller for
        # heads of 256 on Blackwell, and a further variant would be compiled for sequences of one tile.
        cu_seqlens = {"cu_seqlens_q": queries.cu_seqlens, "cu_seqlens_k": keys.cu_seqlens}
        dq, dk, dv = module._flash_attn_bwd(
            q, k, v, out, dout, lse, softmax_scale=_scale(q), causal=call.causal, **cu_seqlens
        )
        return dq, dk, dv

    return Library(attend, derive).functions()


def _bounds(queries: Packed, keys: Packed) -> dict[str, Tensor | int]:
    return {
        "cu_seqlens_q": queries.cu_seqlens,
        "cu_seqlens_k": keys.cu_seqlens,
        "max_seqlen_q": queries.longest,
        "max_seqlen_k": keys.longest,
    }


def _sm_margin(call: Call) -> int:
    return TRANSFER_SMS if call.overlapped else 0


def _scale(q: Tensor) -> float:
    return float(q.shape[-1] ** -0.5)


def _like(tensors: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate uninitialised dq, dk and dv. `tensors` are dout, q, k, v, out, lse."""
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors[1:4])
    return dq, dk, dv
