"""Merges the result of a ring's block into that of the calls before, on GPUs in compiled code.

The plain form reads or writes tensors of the output's size in two kernels. Only these are compiled, into one kernel.
The log-sum-exp is D times smaller (D is the head size), and has many layouts, for each of which the compiler would run
again: stored by heads or by tokens, all rows of a tensor or some.
"""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor

from engine.attention.kernels.call import Merge, blend, merge
from engine.close import mismatch
from engine.dtypes import wider
from engine.models.fuse import TOLERANCE, compiled_function, wanted
from engine.selection import Candidate, select

# (tokens of the block, tokens of the rank, whether it comes from a mate of a team) in the calls of the self-test. The
# second size makes the compiler treat both as variables. It is compiled separately for blocks that begin with the
# rank's first token, and for what mates send, in the wider dtype. So nothing is compiled in a step where the kernel's
# results have the dtype of the model, as those of GPU kernels have.
_TEST_CALLS = ((6, 12, False), (9, 13, False), (14, 14, False), (9, 13, True), (14, 14, True))


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
    return partial(merge, blend=compiled_function(blend))


def fault(compiled: Merge, device: torch.device, dtype: torch.dtype, heads: int, head_dim: int) -> str | None:
    """Compare a compiled merge with the plain one. Returns a description of the first mismatch, or None.

    The tensors are laid out as in a ring: rows of larger tensors, and a log-sum-exp that is stored by heads.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).to(device)

    for tokens, total, of_mate in _TEST_CALLS:
        rows = slice(total - tokens, total)
        part_out, part_lse = random(tokens, heads, head_dim).to(dtype), random(heads, tokens).to(wider(dtype)).T
        if of_mate:  # one message
            message = torch.cat((part_out.to(wider(dtype)), part_lse[..., None]), dim=-1)
            part_out, part_lse = message[..., :-1], message[..., -1]
        out, lse = (x.to(wider(dtype)) for x in (random(total, heads, head_dim), random(heads, total).T))
        expected_out, expected_lse = out.clone(), lse.clone()
        compiled(out[rows], lse[rows], part_out, part_lse)
        merge(expected_out[rows], expected_lse[rows], part_out, part_lse)
        results = [("output", out, expected_out), ("log-sum-exp", lse, expected_lse)]
        if wrong := mismatch(results, TOLERANCE[wider(dtype)]):
            return wrong
    return None
