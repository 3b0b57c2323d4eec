"""Stand-ins for libraries of GPU kernels: the signatures of the released libraries, with results of the reference.

They run on any device, and refuse what the libraries refuse: other dtypes, a last dim that is not contiguous, bounds
that are not int32. They also do what is known to go wrong in a library: `swapping_forward` and `Cudnn`.
"""

# ruff: noqa: N803 - arguments have the names that the libraries give them

from __future__ import annotations

from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.tensor  # now: importing it reads the operators that stand-ins replace
from torch import Tensor

from engine.attention.kernels import reference
from engine.attention.kernels.call import Call


def call(cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, causal: bool) -> Call:
    for bounds, longest in ((cu_q, max_q), (cu_k, max_k)):
        assert bounds.dtype == torch.int32 and bounds.is_contiguous()
        assert longest == max(stop - start for start, stop in pairwise(bounds.tolist()))
    return Call(tuple(cu_q.tolist()), tuple(cu_k.tolist()), causal)


def forward(q: Tensor, k: Tensor, v: Tensor, one: Call) -> tuple[Tensor, Tensor]:
    """Return the output in the inputs' dtype, and the log-sum-exp as [H,T]."""
    assert len({x.dtype for x in (q, k, v)}) == 1 and all(x.stride(-1) == 1 for x in (q, k, v))
    out, lse = reference.load().forward(q, k, v, one)
    return out.to(q.dtype), lse.T.contiguous()


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, one: Call) -> list[Tensor]:
    assert len({x.dtype for x in (dout, q, k, v, out)}) == 1 and all(x.stride(-1) == 1 for x in (dout, q, k, v, out))
    assert lse.shape == (q.shape[1], len(q)) and lse.is_contiguous() and lse.dtype == torch.float32
    return [x.to(q.dtype) for x in reference.load().backward(dout, q, k, v, out, lse.T, one)]


def swapping_forward(
    q: Tensor, k: Tensor, v: Tensor, one: Call, kernel_writes_rows: bool = False
) -> tuple[Tensor, Tensor]:
    """Like flash-attn 2 and PyTorch's copy of it (`mha_varlen_fwd`): swap heads and queries if all sequences have one.

    The R query heads of a key head then become the queries of a sequence. The log-sum-exp is taken as [G,R,N] and
    returned as [G R,N]. The split kernel for paged keys writes [G,N,R] (flash-attention#2573): `kernel_writes_rows`.
    """
    count, groups, repeated = len(one.q_bounds) - 1, k.shape[1], q.shape[1] // k.shape[1]
    if len(q) != count or repeated == 1 or q.shape[2] % 8:
        return forward(q, k, v, one)
    rows = q.view(count, groups, repeated, -1).transpose(1, 2).flatten(0, 1)
    out, lse = forward(rows, k, v, Call(tuple(range(0, len(rows) + 1, repeated)), one.kv_bounds, False))
    written = lse.view(groups, count, repeated)
    written = written if kernel_writes_rows else written.transpose(1, 2)
    return out.view(count, repeated, groups, -1).transpose(1, 2).flatten(1, 2), written.reshape(-1, count)


def flash_attn_2(kernel_writes_rows: bool = False) -> ModuleType:
    """`flash_attn.flash_attn_interface` of 2.8."""
    module = ModuleType("flash_attn.flash_attn_interface")

    def _flash_attn_varlen_forward(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,
        window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Any = None, return_softmax: bool = False,
        block_table: Any = None, leftpad_k: Any = None, seqused_k: Any = None, zero_tensors: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        one = call(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal)
        assert (dropout_p, softmax_scale) == (0.0, q.shape[-1] ** -0.5)
        return *swapping_forward(q, k, v, one, kernel_writes_rows), torch.empty(0), torch.empty(2)

    def _flash_attn_varlen_backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor,
        dv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
        dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int,
        softcap: float, alibi_slopes: Any, deterministic: bool, rng_state: Any = None, zero_tensors: bool = False,
    ) -> Tensor:  # fmt: skip
        one = call(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal)
        assert (window_size_left, window_size_right, softmax_scale) == (-1, -1, q.shape[-1] ** -0.5)
        for room, gradient in zip((dq, dk, dv), backward(dout, q, k, v, out, softmax_lse, one), strict=True):
            room.copy_(gradient)
        return torch.empty(0)

    vars(module).update(locals())
    return module


def flash_attn_3() -> SimpleNamespace:
    """`torch.ops.flash_attn_3`, by the schema of hopper/flash_api.cpp. `margins` lists the `sm_margin` of each call."""
    margins: list[int] = []

    def fwd(
        q: Tensor, k: Tensor, v: Tensor, k_new: Any = None, v_new: Any = None, q_v: Any = None, out: Any = None,
        cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, cu_seqlens_k_new: Any = None, seqused_q: Any = None,
        seqused_k: Any = None, max_seqlen_q: Any = None, max_seqlen_k: Any = None, page_table: Any = None,
        kv_batch_idx: Any = None, leftpad_k: Any = None, rotary_cos: Any = None, rotary_sin: Any = None,
        seqlens_rotary: Any = None, q_descale: Any = None, k_descale: Any = None, v_descale: Any = None,
        softmax_scale: float | None = None, is_causal: bool = False, window_size_left: int = -1,
        window_size_right: int = -1, attention_chunk: int = 0, softcap: float = 0.0,
        is_rotary_interleaved: bool = False, scheduler_metadata: Any = None, num_splits: int = 0,
        pack_gqa: bool | None = None, sm_margin: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        margins.append(sm_margin)
        one = call(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal)
        return *forward(q, k, v, one), torch.empty(0), torch.empty(0)

    def bwd(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Any = None,
        dk: Any = None, dv: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, seqused_q: Any = None,
        seqused_k: Any = None, max_seqlen_q: Any = None, max_seqlen_k: Any = None, softmax_scale: float | None = None,
        is_causal: bool = False, window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
        deterministic: bool = False, sm_margin: int = 0,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        margins.append(sm_margin)
        one = call(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal)
        for room, gradient in zip((dq, dk, dv), backward(dout, q, k, v, out, softmax_lse, one), strict=True):
            room.copy_(gradient)
        return (torch.empty(0),) * 5

    return SimpleNamespace(fwd=fwd, bwd=bwd, margins=margins)


def flash_attn_4() -> ModuleType:
    """`flash_attn.cute.interface` of 4.0.0b36. What we do not pass must have the library's default."""
    module = ModuleType("flash_attn.cute.interface")

    def _flash_attn_fwd(
        q: Tensor, k: Tensor, v: Tensor, qv: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
        seqused_q: Any = None, seqused_k: Any = None, max_seqlen_q: Any = None, max_seqlen_k: Any = None,
        min_seqlen_k: Any = None, page_table: Any = None, softmax_scale: float | None = None, causal: bool = False,
        softcap: Any = None, window_size_left: Any = None, window_size_right: Any = None, learnable_sink: Any = None,
        tile_mn: Any = None, mma_pv_is_rs: Any = None, intra_wg_overlap: Any = None, num_threads: int = 384,
        num_splits: int = 1, pack_gqa: Any = None, _arch: Any = None, score_mod: Any = None, mask_mod: Any = None,
        block_sparse_tensors: Any = None, return_lse: bool = False, out: Any = None, lse: Any = None,
        aux_tensors: Any = None, aux_scalars: Any = None, q_descale: Any = None, k_descale: Any = None,
        v_descale: Any = None, gather_kv_indices: Any = None, scheduler_metadata: Any = None,
        seqlen_k_per_split: Any = None, disable_scheduler_metadata: bool = False, gather_bwd_recompute_p: bool = False,
    ) -> tuple[Tensor, Tensor | None, None, None, None]:  # fmt: skip
        found, log = forward(q, k, v, call(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal))
        return found, log if return_lse else None, None, None, None

    def _flash_attn_bwd(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, softmax_scale: float | None = None,
        causal: bool = False, softcap: float = 0.0, window_size_left: Any = None, window_size_right: Any = None,
        m_block_size: int = 64, n_block_size: int = 128, num_threads: int = 256, pack_gqa: bool = False,
        num_stages_Q: int = 2, num_stages_dO: int = 2, SdP_swapAB: bool = False, dKV_swapAB: bool = False,
        dQ_swapAB: bool = False, AtomLayoutMSdP: int = 2, AtomLayoutNdKV: int = 2, AtomLayoutMdQ: int = 2,
        V_in_regs: bool = False, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, seqused_q: Any = None,
        seqused_k: Any = None, max_seqlen_q: Any = None, max_seqlen_k: Any = None, deterministic: bool = False,
        dq: Any = None, dk: Any = None, dv: Any = None, score_mod: Any = None, score_mod_bwd: Any = None,
        mask_mod: Any = None, aux_tensors: Any = None, aux_scalars: Any = None, block_sparse_tensors: Any = None,
        dlse: Any = None, learnable_sink: Any = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        one = Call(tuple(cu_seqlens_q.tolist()), tuple(cu_seqlens_k.tolist()), causal)
        return tuple(backward(dout, q, k, v, out, lse, one))

    vars(module).update(locals())
    return module


class Cudnn:
    """`torch.ops.aten._scaled_dot_product_cudnn_attention` and its gradient: dense batches [N,H,T,D].

    Calls that are not causal get the NaNs of cuDNN's backward pass on Hopper (pytorch#196678, cudnn-frontend#1072), and
    one query with one key is refused, as seen with cuDNN 9.19.
    """

    def __init__(self) -> None:
        self.calls = 0

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: None, lse: bool, dropout: float, causal: bool, _: bool
    ) -> Any:
        self.calls += 1
        if q.shape[2] == k.shape[2] == 1:
            raise RuntimeError("cuDNN Frontend error: s_q = s_kv = 1 is not supported.")
        one = self._call(q, k, causal)
        out, found = forward(*map(_packed, (q, k, v)), one)
        count, heads, queries, _size = q.shape
        by_sequence = found.view(heads, count, queries).transpose(0, 1).contiguous()[..., None]
        return out.unflatten(0, (count, queries)).transpose(1, 2), by_sequence, None, None, queries, k.shape[2]

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seed: Tensor, offset: Tensor,
        bias: None, cum_seq_q: None, cum_seq_k: None, max_q: int, max_k: int, dropout: float, causal: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        self.calls += 1
        assert (max_q, max_k) == (q.shape[2], k.shape[2]) and lse.shape == (*q.shape[:3], 1) and lse.is_contiguous()
        assert dout.stride() == out.stride() == q.stride(), "cuDNN wants them alike"
        by_head = lse[..., 0].transpose(0, 1).flatten(1).contiguous()
        found = backward(*map(_packed, (dout, q, k, v, out)), by_head, self._call(q, k, causal))
        if not causal and max_k % 128 == 64:
            found[0][by_head.T < -88.7] = float("nan")
        if not causal and max_q == 1 and (lse < 0).any():
            found[1:] = [torch.full_like(x, float("nan")) for x in found[1:]]
        return tuple(x.unflatten(0, (len(q), -1)).transpose(1, 2) for x in found)

    def _call(self, q: Tensor, k: Tensor, causal: bool) -> Call:
        bounds = (tuple(range(0, len(x) * x.shape[2] + 1, x.shape[2])) for x in (q, k))
        return Call(*bounds, causal)


def _packed(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(0, 1)


def torch_varlen(patch: pytest.MonkeyPatch) -> None:
    """Put `torch.ops.aten._flash_attention_forward` and its gradient on CPU."""

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *rest: Any) -> Any:
        dropout, causal, debug = rest
        assert (dropout, debug) == (0.0, False)
        return *swapping_forward(q, k, v, call(cu_q, cu_k, max_q, max_k, causal)), None, None, None

    def derive(*inputs: Any) -> Any:
        *tensors, cu_q, cu_k, max_q, max_k, dropout, causal, _seed, _unused = inputs
        assert dropout == 0.0
        return tuple(backward(*tensors, call(cu_q, cu_k, max_q, max_k, causal)))

    patch.setattr(torch.ops.aten, "_flash_attention_forward", attend)
    patch.setattr(torch.ops.aten, "_flash_attention_backward", derive)
