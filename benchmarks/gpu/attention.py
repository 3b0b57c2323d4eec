"""Attention on one GPU: kernels alone, our attention, packed sequences, one rank of a ring of 8, and of real plans.

`python benchmarks/gpu/attention.py [--json FILE]` uses bf16, head size 128, 32 query heads and 8 key heads, causal.
Each (query, key) pair counts 4 x head size x query heads FLOPs forward, and 2.5 times that backward. Times are medians
between CUDA events after a warm-up. Messages of the ring are replaced by copies on the device, so its time shows the
cost of splitting, merging and adding, not of the network. The ring has the merge that training selects, and for
comparison the uncompiled one. Each rate is also printed as a fraction of the best in its group: all kernels at one
length; packed sequences and a single one; a ring and a single call.

If the kernel is cuDNN, it serves all of these calls that it can. In the steps of plans (`plans.py`) each call has the
kernel that training would use. They are run twice: `first_ms` is the time of the first run, in which most shapes are
new and kernels may stall, `ms` that of the second one.

The rows are written after each case, the shortest length first. Exit codes: 1 if a run fails, 3 without a CUDA device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu import on_gpu, plans
from benchmarks.gpu.on_gpu import Row
from engine.attention.buffers import Buffers
from engine.attention.comm import Exchange
from engine.attention.kernels.call import Call, Kernel, merge
from engine.attention.kernels.choice import KERNELS, choose
from engine.attention.layout import Layout, layout
from engine.attention.ring import attend
from engine.config.load import load
from engine.config.schema import Config
from engine.cost.times import rounds_per_call
from engine.planner.plan.step_plan import MicroBatch, Shard
from engine.trainer.model import kernel_of

DTYPE = torch.bfloat16
DEGREE, PART = 8, 3  # of the ring, and the position of the measured rank
BACKWARD = 2.5  # FLOPs of the backward pass, as a multiple of the forward pass


@dataclass(frozen=True)
class Sizes:
    """The sizes to measure with."""

    heads: int = 32
    groups: int = 8
    head_dim: int = 128
    lengths: tuple[int, ...] = (8192, 32768, 131072)
    packed: int = 64  # sequences
    of: int = 4096  # tokens of each packed sequence
    rank_tokens: int = 8192  # tokens of each rank of the ring, and capacity of the plans
    context: int = 65536  # of the plans
    steps: int = 6  # of the plans
    repeats: int = 20
    warm_ups: int = 3
    most_s: float = 1.5  # of the repeats, and of the warm-ups: fewer than that, but at least three, if they take longer

    @property
    def config(self) -> Config:
        """A config with these heads, from which training would select the kernel."""
        shape = {"heads": self.heads, "kv_heads": self.groups, "hidden": self.heads * self.head_dim}
        return load(["recipe=h200-1b-8k", *(f"model.{key}={value}" for key, value in shape.items())])


TINY = Sizes(4, 2, 16, (64, 1024), packed=4, of=64, rank_tokens=32, context=256, steps=2, repeats=1, warm_ups=1)


def main() -> None:
    """Print the tables. Rows are written as they come."""
    options = on_gpu.parse_options(__doc__)
    device, sizes = on_gpu.device_of(options), TINY if options.dry_run else Sizes()
    chosen = kernel_of(sizes.config, device, DEGREE)
    print(f"{on_gpu.machine(device)['device']}, torch {torch.__version__}, kernel {chosen.name} ({chosen.reason})")
    for line in chosen.rejected:
        print(f"- {line}")
    rows: list[Row] = []
    for row in cases(device, chosen, sizes):
        rows.append(row)
        on_gpu.write(options.json, device, kernel=chosen.name, rows=rows)
    show(rows)
    on_gpu.leave(rows)


def cases(device: torch.device, chosen: Kernel, sizes: Sizes) -> Iterator[Row]:
    """Measure everything, what has a goal first, and the longest sequences last. `chosen` is the kernel of training."""
    with_plans = kernel_of(sizes.config, device, DEGREE, plan_build_s=0.0)
    candidates = working_kernels(device, sizes)
    shortest, *longer = sizes.lengths
    yield from raw_and_seam(device, with_plans, candidates, shortest, sizes)
    yield from ring(device, with_plans, sizes)
    yield from plans_of_a_rank(device, chosen, sizes)
    yield from packing(device, with_plans, sizes)
    for length in longer:
        yield from raw_and_seam(device, with_plans, candidates, length, sizes)


def raw_and_seam(
    device: torch.device, chosen: Kernel, candidates: Sequence[Kernel], length: int, sizes: Sizes
) -> Iterator[Row]:
    """Measure our attention, and each kernel alone, on one sequence."""
    inputs, one = tensors(length, device, sizes), unsplit([length])
    runs = {f"ours ({chosen.name})": partial(ours, chosen, one, inputs)}
    runs |= {f"{kernel.name}, raw": partial(raw, kernel, one, inputs) for kernel in candidates}
    for name, run in runs.items():
        yield from measured("kernels", name, f"{length // 1024}K", length * (length + 1) / 2, run, device, sizes)


def packing(device: torch.device, chosen: Kernel, sizes: Sizes) -> Iterator[Row]:
    """Measure many packed sequences, and a single one with the same FLOPs."""
    packed, of = sizes.packed, sizes.of
    alone = int((packed * of * of) ** 0.5)
    unequal = [of // 2 + (997 * number) % of for number in range(packed)]  # cannot be a dense batch
    mixes = {f"{packed} of {of}": [of] * packed, f"{packed} unequal": unequal, f"1 of {alone}": [alone]}
    for name, lengths in mixes.items():
        run, pairs = partial(ours, chosen, unsplit(lengths)), sum(n * (n + 1) / 2 for n in lengths)
        inputs = tensors(sum(lengths), device, sizes)
        yield from measured("packing", f"ours ({chosen.name})", name, pairs, partial(run, inputs), device, sizes)


def ring(device: torch.device, chosen: Kernel, sizes: Sizes) -> Iterator[Row]:
    """Measure one rank of a ring, and one call of the kernel with the same number of (query, key) pairs.

    Further rows have the ring with the uncompiled merge, if `chosen` has the compiled one, and as in pipelines, with
    several rounds a call.
    """
    tokens = sizes.rank_tokens
    total = DEGREE * tokens
    shard = Shard(0, total, tuple(range(DEGREE)), PART)
    micro = MicroBatch(index=0, rank=PART, gang=0, slot=-1, shards=(shard,))
    one = layout(micro)
    pairs = total * (total + 1) / 2 / DEGREE
    alone = int((2 * pairs) ** 0.5)
    kernels = {f"ours ({chosen.name})": chosen}
    if chosen.merge is not merge:
        kernels[f"{chosen.name}, uncompiled merge"] = replace(chosen, merge=merge)
    inputs = tensors(tokens, device, sizes)
    for name, kernel in kernels.items():
        replayed = partial(ours, kernel, one, inputs, Replay())
        yield from measured("ring", name, f"ring of {DEGREE}, {tokens} a rank", pairs, replayed, device, sizes)
    most = rounds_per_call(stages=2)
    several_rounds = partial(ours, chosen, layout(micro, most), inputs, Replay())
    what = f"ring of {DEGREE}, {tokens} a rank, {most} rounds a call"
    yield from measured("ring", f"ours ({chosen.name})", what, pairs, several_rounds, device, sizes)
    single = partial(raw, chosen, unsplit([alone]), tensors(alone, device, sizes))
    pairs = alone * (alone + 1) / 2
    yield from measured("ring", f"{chosen.name}, raw", f"1 of {alone}", pairs, single, device, sizes)


def plans_of_a_rank(device: torch.device, chosen: Kernel, sizes: Sizes) -> Iterator[Row]:
    """Measure the attention of one of eight ranks in steps of real plans, each step twice."""
    config = plans.config_of(DEGREE, sizes.rank_tokens, sizes.context, DEGREE * DEGREE * sizes.rank_tokens)
    for number, step in enumerate(plans.planned(config, sizes.steps, PART)):
        case = {"group": "plan, forward + backward", "kernel": f"ours ({chosen.name})", "lengths": f"step {number}"}
        case["passes"] = "forward + backward"
        pairs = sum(plans.pairs_of(micro) for micro in step)
        try:
            layouts = [layout(micro) for micro in step]
            inputs = [tensors(one.tokens, device, sizes) for one in layouts]

            def run(layouts: list[Layout] = layouts, inputs: list[tuple[Tensor, ...]] = inputs) -> None:
                for one, tensors_of_one in zip(layouts, inputs, strict=True):
                    ours(chosen, one, tensors_of_one, Replay(), backward=True)

            first, again = (on_gpu.milliseconds(run, device) for _ in range(2))
        except Exception as error:
            yield on_gpu.failed(case, error)
            continue
        rate = 4 * sizes.head_dim * sizes.heads * pairs * (1 + BACKWARD) / again / 1e9
        yield case | {"ms": again, "first_ms": first, "tflops_per_s": rate}


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


def working_kernels(device: torch.device, sizes: Sizes) -> list[Kernel]:
    """The kernels that work on this machine; prints the others with a reason."""
    found = []
    for name in KERNELS:
        try:
            found += [choose(device, DTYPE, sizes.head_dim, name)] if name != "reference" else []
        except ValueError as error:
            print(f"- {error}")
    return found


def unsplit(lengths: list[int]) -> Layout:
    """The layout of unsplit sequences."""
    shards = tuple(Shard(number, length, (0,), 0) for number, length in enumerate(lengths))
    return layout(MicroBatch(index=0, rank=0, gang=0, slot=-1, shards=shards))


def tensors(tokens: int, device: torch.device, sizes: Sizes) -> tuple[Tensor, ...]:
    """Random q, k, v and gradient of the output, each [tokens, heads, head_dim]."""
    shapes = ((tokens, heads, sizes.head_dim) for heads in (sizes.heads, sizes.groups, sizes.groups, sizes.heads))
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


def measured(
    group: str, name: str, what: str, pairs: float, run: Callable[..., None], device: torch.device, sizes: Sizes
) -> Iterator[Row]:
    """Measure `run` forward, and forward with backward; `pairs` is its number of (query, key) pairs.

    A failure is printed and recorded in its row.
    """
    for passes, flops in (("forward", 1.0), ("forward + backward", 1.0 + BACKWARD)):
        among = f"{group} {what}" if group == "kernels" else group
        case = {"group": f"{among}, {passes}", "kernel": name, "lengths": what, "passes": passes}
        try:
            seconds = seconds_of(partial(run, backward=flops > 1), device, sizes)
        except Exception as error:
            yield on_gpu.failed(case, error)
        else:
            rate = 4 * sizes.head_dim * sizes.heads * pairs * flops / seconds / 1e12
            yield case | {"ms": 1e3 * seconds, "tflops_per_s": rate}


def seconds_of(run: Callable[[], object], device: torch.device, sizes: Sizes) -> float:
    """Return the median time of `run` after a warm-up."""

    def timed() -> float:
        return on_gpu.milliseconds(run, device) / 1e3

    on_gpu.repeated(timed, sizes.warm_ups, sizes.most_s)
    return median(on_gpu.repeated(timed, sizes.repeats, sizes.most_s))


def show(rows: list[Row]) -> None:
    """Print the rows as a table, with each rate as a fraction of the best in its group."""
    rows = [row for row in rows if "error" not in row]
    print("\n| lengths | passes | kernel | ms | TFLOP/s | fraction of the best |\n|---|---|---|---|---|---|")
    for row in rows:
        same = [float(other["tflops_per_s"]) for other in rows if other["group"] == row["group"]]
        rate = float(row["tflops_per_s"])
        first = f" (first {row['first_ms']:.1f})" if "first_ms" in row else ""
        figures = f"{row['ms']:.3f}{first} | {rate:.0f} | {rate / max(same):.3f}"
        print(f"| {row['lengths']} | {row['passes']} | {row['kernel']} | {figures} |")


if __name__ == "__main__":
    main()
