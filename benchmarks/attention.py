"""Overhead of our attention on a CPU: one packed call over unsplit sequences against one kernel call per sequence.

`python benchmarks/attention.py` runs forward and backward passes of three variants in alternation: the kernel with one
result per sequence; the kernel with its results joined into packed tensors, as a model needs them; and our attention.
For each mix of lengths it prints the median over rounds of the ratio of times, so that load from other programs cancels
out. The exit code is 1 if ours takes more than 1.05 times as long as the joined variant. Joining takes a large part of
the time for very short sequences, and the first variant does not include it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from engine.attention.kernels.choice import choose
from engine.attention.layout import Layout, layout
from engine.attention.ring import attend
from engine.planner.plan.step_plan import MicroBatch, Shard

HEADS, GROUPS, HEAD_DIM = 8, 2, 64
MIXES = {
    "1 x 4096": [4096],
    "4 x 1024": [1024] * 4,
    "16 x 256": [256] * 16,
    "64 x 64": [64] * 64,
    "17 to 240, all different": [17 + (37 * number) % 224 for number in range(28)],
    "2048, 1024, 16 x 64": [2048, 1024, *[64] * 16],
}
SECONDS = 6.0  # per mix
LIMIT = 1.05


def main() -> None:
    """Print the table. Exit code 1 if a ratio is above the limit."""
    torch.set_num_threads(1)
    print(
        f"float32, {HEADS}/{GROUPS} heads of {HEAD_DIM}, forward and backward, one thread, torch {torch.__version__}\n"
    )
    print("| lengths | kernel, ms | joined, ms | ours, ms | ours / joined | ours / kernel |")
    print("|---|---|---|---|---|---|")
    worst = max(compare(name, lengths) for name, lengths in MIXES.items())
    print(f"\nworst {worst:.3f}, limit {LIMIT}")
    sys.exit(worst > LIMIT)


def compare(name: str, lengths: list[int]) -> float:
    """Measure a mix of lengths and print its row; returns the time of ours / that of the joined variant."""
    inputs = tensors(sum(lengths))
    runs: list[Callable[[], object]] = [
        lambda: by_sequence(lengths, inputs),
        lambda: joined(by_sequence(lengths, inputs)),
        lambda: packed(packing(lengths), inputs),
    ]
    for run in runs:
        run()
    times, began = list[list[float]](), time.perf_counter()
    while time.perf_counter() - began < SECONDS or len(times) < 9:
        turn = len(times) % 3  # rotated, so that each is first, second and third equally often
        found = [seconds(run) for run in (*runs[turn:], *runs[:turn])]
        times.append([*found[3 - turn :], *found[: 3 - turn]])
    raw, kernel, ours = (1e3 * median(column) for column in zip(*times, strict=True))
    ratios = [median(row[2] / row[base] for row in times) for base in (1, 0)]
    print(f"| {name} | {raw:.1f} | {kernel:.1f} | {ours:.1f} | {ratios[0]:.3f} | {ratios[1]:.3f} |", flush=True)
    return ratios[0]


def tensors(tokens: int) -> tuple[Tensor, ...]:
    """Random q, k, v and gradient of the output, each [tokens, heads, HEAD_DIM]."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, heads, HEAD_DIM) for heads in (HEADS, GROUPS, GROUPS, HEADS))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def packing(lengths: list[int]) -> Layout:
    """The layout of unsplit sequences in one micro-batch."""
    shards = tuple(Shard(number, length, (0,), 0) for number, length in enumerate(lengths))
    return layout(MicroBatch(index=0, rank=0, gang=0, slot=-1, shards=shards))


def packed(one: Layout, inputs: tuple[Tensor, ...]) -> None:
    """Run our attention, forward and backward."""
    q, k, v, dout = inputs
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    attend(q, k, v, one, None, choose(q.device, q.dtype, HEAD_DIM)).backward(dout)


def by_sequence(lengths: list[int], inputs: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """Run the kernel, forward and backward, on each sequence; returns (out, dq, dk, dv) per sequence."""
    operators, start, results = torch.ops.aten, 0, []
    for length in lengths:
        q, k, v, dout = (x[start : start + length].transpose(0, 1)[None] for x in inputs)
        out, lse = operators._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        gradients = operators._scaled_dot_product_flash_attention_for_cpu_backward(dout, q, k, v, out, lse, 0.0, True)
        results.append((out, *gradients))
        start += length
    return results


def joined(results: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """Join the results of all sequences into packed tensors: out, dq, dk, dv."""
    return [torch.cat([x[0].transpose(0, 1) for x in parts]) for parts in zip(*results, strict=True)]


def seconds(run: Callable[[], object]) -> float:
    """Measure the processor time of a run in seconds, which does not include other programs."""
    began = time.process_time()
    run()
    return time.process_time() - began


if __name__ == "__main__":
    main()
