"""Merges the result of a ring's block into that of the calls before, on GPUs in compiled code.

The plain form reads or writes tensors of the output's size in two kernels, and smaller ones in four more. Only the
former are compiled, into one kernel. The log-sum-exp is D times smaller, and has many layouts, for each of which the
compiler would run again: stored by heads or by tokens, all rows of a tensor or some.

Letters: T query tokens, H query heads, D head size.
"""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor

from engine.attention.kernels.call import Merge, merge
from engine.close import mismatch
from engine.dtypes import wider
from engine.models.fuse import TOLERANCE, compiled_function, wanted
from engine.selection import Candidate, select

# (tokens of the block, tokens of the rank) in the calls of the self-test. The second size makes the compiler treat both
# as variables. It has code of its own for blocks that begin with the rank's first token. So nothing is compiled in a
# step.
_TEST_TOKENS = ((6, 12), (9, 13), (14, 14))


@cache
def choose(device: torch.device, dtype: torch.dtype, heads: int, head_dim: int, wish: str = "auto") -> Merge:
    """Return the compiled `merge` if `wish` (the config's `compile`) asks for it and it works, else the plain one.

    `dtype` is that of the model. Logs the reason, and is cached.
    """
    if not wanted(wish, device):
        return merge
    test = partial(fault, device=device, dtype=dtype, heads=heads, head_dim=head_dim)
    with_compiler: Candidate[Merge] = Candidate("torch.compile", "fused kernels", _compiled, test)
    eager: Candidate[Merge] = Candidate("eager", "torch.compile does not work here", lambda: merge)
    return select(f"merge of ring blocks for {dtype} on {device.type}", (with_compiler, eager)).implementation


def _compiled() -> Merge:
    """Return `merge` (kernels/call.py) with its operations on the output compiled."""
    blend = compiled_function(_blend)

    def compiled_merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
        weight = lse.new_empty(lse.shape)  # contiguous, whatever the layout of `lse`
        torch.sub(part_lse, lse, out=weight)
        blend(out, part_out, weight.sigmoid_())
        lse.copy_(torch.logaddexp(lse, part_lse))

    return compiled_merge


def _blend(out: Tensor, part_out: Tensor, weight: Tensor) -> None:
    """Move `out` [T,H,D] towards `part_out`, in place, by the fraction `weight` [T,H]."""
    out.lerp_(part_out.to(out.dtype), weight[..., None])


def fault(compiled: Merge, device: torch.device, dtype: torch.dtype, heads: int, head_dim: int) -> str | None:
    """Compare a compiled merge with the plain one. Returns a description of the first mismatch, or None.

    The tensors are laid out as in a ring: rows of larger tensors, and a log-sum-exp that is stored by heads.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).to(device)

    for tokens, total in _TEST_TOKENS:
        rows = slice(total - tokens, total)
        part_out, part_lse = random(tokens, heads, head_dim).to(dtype), random(heads, tokens).to(wider(dtype)).T
        out, lse = (x.to(wider(dtype)) for x in (random(total, heads, head_dim), random(heads, total).T))
        expected_out, expected_lse = out.clone(), lse.clone()
        compiled(out[rows], lse[rows], part_out, part_lse)
        merge(expected_out[rows], expected_lse[rows], part_out, part_lse)
        results = [("output", out, expected_out), ("log-sum-exp", lse, expected_lse)]
        if wrong := mismatch(results, TOLERANCE[wider(dtype)]):
            return wrong
    return None
