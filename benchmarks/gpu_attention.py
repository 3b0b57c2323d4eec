"""Attention on one GPU: kernels alone, our attention, packed sequences, and one rank of a ring of 8.

`python benchmarks/gpu_attention.py [--json FILE]` uses bf16, head size 128, 32 query heads and 8 key heads, causal.
Each (query, key) pair counts 4 x head size x query heads FLOPs forward, and 2.5 times that backward. Times are medians
between CUDA events after a warm-up. Messages of the ring are replaced by copies on the device, so its time shows the
cost of splitting, merging and adding, not of the network. Each rate is also printed as a fraction of the best in its
group: all kernels at one length; packed sequences and a single one; a ring and a single call. Exit codes: 1 if a run
fails, 3 without a CUDA device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import on_gpu
from benchmarks.on_gpu import Row
from engine.attention.buffers import Buffers
from engine.attention.comm import Exchange
from engine.attention.kernels.call import Call, Kernel
from engine.attention.kernels.choice import KERNELS, choose
from engine.attention.layout import Layout, layout
from engine.attention.ring import attend
from engine.planner.plan.step_plan import MicroBatch, Shard

HEADS, GROUPS, HEAD_DIM, DTYPE = 32, 8, 128, torch.bfloat16
LENGTHS = (8192, 32768, 131072)
PACKED, OF = 64, 4096  # number of packed sequences, tokens of each
DEGREE, PART = 8, 3  # of the ring, and the position of the measured rank
RANK_TOKENS = 8192
REPEATS, WARM_UPS = 20, 3
BACKWARD = 2.5  # FLOPs of the backward pass, as a multiple of the forward pass


def main() -> None:
    """Print the tables."""
    path = on_gpu.parse_options(__doc__).json
    device = torch.device("cuda", 0)
    chosen = choose(device, DTYPE, HEAD_DIM)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, kernel {chosen.name} ({chosen.reason})")
    for line in chosen.rejected:
        print(f"- {line}")
    rows = [*raw_and_seam(device, chosen), *packing(device, chosen), *ring(device, chosen)]
    show(rows)
    on_gpu.write(path, device, kernel=chosen.name, rows=rows)
    on_gpu.leave(rows)


def raw_and_seam(device: torch.device, chosen: Kernel) -> list[Row]:
    """Measure each kernel alone, and our attention, at each length."""
    rows = []
    for length in LENGTHS:
        inputs, one = tensors(length, device), unsplit([length])
        runs = {f"{kernel.name}, raw": partial(raw, kernel, one, inputs) for kernel in working_kernels(device)}
        runs[f"ours ({chosen.name})"] = partial(ours, chosen, one, inputs)
        for name, run in runs.items():
            rows += measured("kernels", name, f"{length // 1024}K", length * (length + 1) / 2, run)
    return rows


def packing(device: torch.device, chosen: Kernel) -> list[Row]:
    """Measure many packed sequences, and a single one with the same FLOPs."""
    alone = int((PACKED * OF * OF) ** 0.5)
    unequal = [OF // 2 + (997 * number) % OF for number in range(PACKED)]  # cannot be a dense batch
    rows = []
    mixes = {f"{PACKED} of {OF}": [OF] * PACKED, f"{PACKED} unequal": unequal, f"1 of {alone}": [alone]}
    for name, lengths in mixes.items():
        run = partial(ours, chosen, unsplit(lengths), tensors(sum(lengths), device))
        rows += measured("packing", f"ours ({chosen.name})", name, sum(n * (n + 1) / 2 for n in lengths), run)
    return rows


def ring(device: torch.device, chosen: Kernel) -> list[Row]:
    """Measure one rank of a ring, and one call of the kernel with the same number of (query, key) pairs."""
    total = DEGREE * RANK_TOKENS
    shard = Shard(0, total, tuple(range(DEGREE)), PART)
    one = layout(MicroBatch(index=0, rank=PART, gang=0, slot=-1, shards=(shard,)))
    pairs = total * (total + 1) / 2 / DEGREE
    alone = int((2 * pairs) ** 0.5)
    replayed = partial(ours, chosen, one, tensors(RANK_TOKENS, device), Replay())
    single = partial(raw, chosen, unsplit([alone]), tensors(alone, device))
    return [
        *measured("ring", f"ours ({chosen.name})", f"ring of {DEGREE}, {RANK_TOKENS} a rank", pairs, replayed),
        *measured("ring", f"{chosen.name}, raw", f"1 of {alone}", alone * (alone + 1) / 2, single),
    ]


class Replay:
    """Stands in for the communication of a ring: the rank receives a copy of each buffer that it sends."""

    def __init__(self) -> None:
        self.buffers = Buffers()

    def post(self, exchanges: Sequence[Exchange]) -> Replay:
        """Copy each sent buffer to its receive buffer, on the current stream."""
        for send, _, receive, _ in exchanges:
            size = min(send.numel(), receive.numel())
            receive.view(-1)[:size].copy_(send.view(-1)[:size])
        return self

    def wait(self) -> None:
        """Do nothing: the copies run on the current stream, in order."""


def working_kernels(device: torch.device) -> list[Kernel]:
    """The kernels that work on this machine; prints the others with a reason."""
    found = []
    for name in KERNELS:
        try:
            found += [choose(device, DTYPE, HEAD_DIM, name)] if name != "reference" else []
        except ValueError as error:
            print(f"- {error}")
    return found


def unsplit(lengths: list[int]) -> Layout:
    """The layout of unsplit sequences."""
    shards = tuple(Shard(number, length, (0,), 0) for number, length in enumerate(lengths))
    return layout(MicroBatch(index=0, rank=0, gang=0, slot=-1, shards=shards))


def tensors(tokens: int, device: torch.device) -> tuple[Tensor, ...]:
    """Random q, k, v and gradient of the output, each [tokens, heads, HEAD_DIM]."""
    shapes = ((tokens, heads, HEAD_DIM) for heads in (HEADS, GROUPS, GROUPS, HEADS))
    return tuple(torch.randn(shape, device=device, dtype=DTYPE) for shape in shapes)


def raw(kernel: Kernel, one: Layout, inputs: tuple[Tensor, ...], backward: bool) -> None:
    """Call a kernel directly, forward and optionally backward."""
    q, k, v, dout = inputs
    call = Call(one.bounds, one.bounds, causal=True)
    out, lse = kernel.forward(q, k, v, call)
    if backward:
        kernel.backward(dout, q, k, v, out, lse, call)


def ours(
    kernel: Kernel, one: Layout, inputs: tuple[Tensor, ...], comm: Replay | None = None, *, backward: bool
) -> None:
    """Run our attention, forward and optionally backward; `comm` stands in for the ring's communication."""
    q, k, v, dout = inputs
    with torch.set_grad_enabled(backward):
        q, k, v = (x.detach().requires_grad_(backward) for x in (q, k, v))
        out = attend(q, k, v, one, comm, kernel)
    if backward:
        out.backward(dout)


def measured(group: str, name: str, what: str, pairs: float, run: Callable[..., None]) -> list[Row]:
    """Measure `run` forward, and forward with backward; `pairs` is its number of (query, key) pairs.

    A failure is printed and recorded in its row.
    """
    rows: list[Row] = []
    for passes, flops in (("forward", 1.0), ("forward + backward", 1.0 + BACKWARD)):
        among = f"{group} {what}" if group == "kernels" else group
        case = {"group": f"{among}, {passes}", "kernel": name, "lengths": what, "passes": passes}
        try:
            ms = milliseconds(partial(run, backward=flops > 1))
        except Exception as error:
            rows.append(on_gpu.failed(case, error))
        else:
            rows.append(case | {"ms": ms, "tflops_per_s": 4 * HEAD_DIM * HEADS * pairs * flops / ms / 1e9})
    return rows


def milliseconds(run: Callable[[], None]) -> float:
    """Median time of a run on the device, in ms."""
    for _ in range(WARM_UPS):
        run()
    times = []
    for _ in range(REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return median(times)


def show(rows: list[Row]) -> None:
    """Print the rows as a table, with each rate as a fraction of the best in its group."""
    rows = [row for row in rows if "error" not in row]
    print("\n| lengths | passes | kernel | ms | TFLOP/s | fraction of the best |\n|---|---|---|---|---|---|")
    for row in rows:
        same = [float(other["tflops_per_s"]) for other in rows if other["group"] == row["group"]]
        rate = float(row["tflops_per_s"])
        figures = f"{row['ms']:.3f} | {rate:.0f} | {rate / max(same):.3f}"
        print(f"| {row['lengths']} | {row['passes']} | {row['kernel']} | {figures} |")


if __name__ == "__main__":
    main()
