"""Error of dK,dV in bf16 by how they travel in a ring, for degrees 2 to 64.

    python benchmarks/dkv_messages.py [--tokens 2048] [--seeds 3]

RMS difference from float64, divided by that of one call of the same kernel. One sequence, head size 32, two query heads
and one key head; all ranks of the ring are computed in one process. Three ways:

- fp32 sum: the sum follows its K,V around the ring in fp32, as `engine/attention/ring.py` does;
- bf16 sum: the same, rounded to bf16 whenever it is sent on (half of the bytes);
- bf16 to owner: each rank sends its own contribution in bf16 to the rank that owns the keys, which adds them in fp32
  (half of the bytes).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from engine.attention.kernels import cpu, reference
from engine.attention.kernels.call import Backward, Call
from engine.planner.plan.schedule import blocks, shard_spans
from tests.attention.gpu_like import GPU_LIKE

DEGREES = (2, 4, 8, 16, 32, 64)
HEADS, GROUPS, HEAD_DIM = 2, 1, 32
KERNELS = {"rounds its results, as on GPUs": GPU_LIKE.backward, "fp32 results (CPU)": cpu.load().backward}


def bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


# From the sum so far, the next contribution, and whether it is the owner's own, to the new sum.
WAYS: dict[str, Callable[[Tensor, Tensor, bool], Tensor]] = {
    "fp32 sum": lambda total, part, own: total + part,
    "bf16 sum": lambda total, part, own: bf16(total + part),
    "bf16 to owner": lambda total, part, own: total + (part if own else bf16(part)),
}


def main() -> None:
    """Print a table for each kernel."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    for name, backward in KERNELS.items():
        alone = errors(backward, 1, arguments.tokens, arguments.seeds)["fp32 sum"]
        print(f"\nkernel: {name}\n| degree | {' | '.join(f'{way}, dk | dv' for way in WAYS)} |\n{'|---' * 7}|")
        for degree in DEGREES:
            found = errors(backward, degree, arguments.tokens, arguments.seeds)
            ratios = (f"{error / one:.2f}" for way in WAYS for error, one in zip(found[way], alone, strict=True))
            print(f"| {degree} | {' | '.join(ratios)} |", flush=True)


def errors(backward: Backward, degree: int, tokens: int, seeds: int) -> dict[str, tuple[float, float]]:
    """Return the RMS errors of dk and dv of each way, mean over seeds."""
    sums = dict.fromkeys(WAYS, (0.0, 0.0))
    for seed in range(seeds):
        exact, found = gradients(backward, degree, tokens, seed)
        for way, parts in found.items():
            off = [float((x.double() - y).pow(2).mean().sqrt()) / seeds for x, y in zip(parts, exact, strict=True)]
            sums[way] = (sums[way][0] + off[0], sums[way][1] + off[1])
    return sums


def gradients(
    backward: Backward, degree: int, tokens: int, seed: int
) -> tuple[tuple[Tensor, Tensor], dict[str, tuple[Tensor, Tensor]]]:
    """Return dk and dv in float64, and in bf16 by each way, all [tokens, GROUPS, HEAD_DIM]."""
    generator = torch.Generator().manual_seed(seed)
    heads = (HEADS, GROUPS, GROUPS, HEADS)
    q, k, v, dout = (torch.randn(tokens, count, HEAD_DIM, generator=generator).bfloat16() for count in heads)
    whole = Call((0, tokens), (0, tokens), causal=True)
    exact_out, exact_lse = reference.forward(q.double(), k.double(), v.double(), whole)
    _, exact_dk, exact_dv = reference.backward(
        dout.double(), q.double(), k.double(), v.double(), exact_out, exact_lse, whole
    )
    out, lse = exact_out.bfloat16(), exact_lse.float()
    rows = [
        torch.cat([torch.arange(span.start, span.stop) for span in shard_spans(tokens, degree, part)])
        for part in range(degree)
    ]
    found = {way: (torch.empty_like(k), torch.empty_like(v)) for way in WAYS}
    for owner, own_rows in enumerate(rows):
        sums = {way: [torch.zeros(len(own_rows), GROUPS, HEAD_DIM) for _ in range(2)] for way in WAYS}
        for distance in range(degree):
            rank = (owner + distance) % degree
            queries, keys = rows[rank], own_rows
            if rank != owner:
                (one,) = blocks(tokens, degree, rank, [owner])
                queries, keys = queries[one.q_start : one.q_stop], keys[: one.keys[0]]
            call = Call((0, len(queries)), (0, len(keys)), causal=rank == owner)
            inputs = (dout[queries], q[queries], k[keys], v[keys], out[queries], lse[queries])
            _, *parts = backward(*inputs, call)
            for way, add in WAYS.items():
                for total, part in zip(sums[way], parts, strict=True):
                    total[: len(keys)] = add(total[: len(keys)], part.float(), distance == 0)
        for way, totals in sums.items():
            for result, total in zip(found[way], totals, strict=True):
                result[own_rows] = total.bfloat16()
    return (exact_dk, exact_dv), found


if __name__ == "__main__":
    main()
