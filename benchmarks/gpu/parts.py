"""Rates of the parts of a step on one GPU: products, weight gradients, FP8, attention of packs, loss, update.

`python benchmarks/gpu/parts.py [--json FILE] [--only PART] [--dry-run]` has medians between CUDA events, in bf16, for
8,192 tokens of the 1B and the 8B shape. What each part decides:

    products   the rate of linear layers for these shapes, which is the floor of every MFU
    gradients  a product in bf16 and an addition in fp32, against one product that adds into fp32
    fp8        products with one scale a tensor, and with the quantisation of both operands
    packs      attention of unequal packed sequences with each kernel that works here, flash-attn 3 and 4 among them
    loss       the head with its loss, against its products alone
    update     AdamW, fused and not

A part that fails is recorded in its rows, and the others still run. Exit codes: 1 if one failed, 3 without a CUDA
device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu import attention, on_gpu
from benchmarks.gpu.on_gpu import Row
from engine.models.common.loss import choose

DTYPE, FP8 = torch.bfloat16, torch.float8_e4m3fn


class Shape(NamedTuple):
    """Widths of a model; `qkv` is that of queries, keys and values together."""

    hidden: int
    ffn: int
    qkv: int
    vocab: int = 32768


class Sizes(NamedTuple):
    """What is measured. `packs` are the sizes of the attention benchmark."""

    tokens: int
    shapes: dict[str, Shape]
    parameters: int
    repeats: int
    packs: attention.Sizes


SIZES = Sizes(8192, {"1b": Shape(2048, 8192, 3072), "8b": Shape(4096, 14336, 6144)}, 2**28, 20, attention.Sizes())
TINY = Sizes(64, {"tiny": Shape(64, 128, 96, 512)}, 2**10, 1, attention.TINY)


def main() -> None:
    """Print a line per row; rows are written after each part."""
    options = on_gpu.parse_options(__doc__, tuple(PARTS))
    device, sizes, rows = on_gpu.device_of(options), TINY if options.dry_run else SIZES, list[Row]()
    for name in [options.only] if options.only else PARTS:
        for row in attempted(name, device, sizes):
            rows.append(row)
            figures = (f"{key} {value:.4g}" if isinstance(value, float) else str(value) for key, value in row.items())
            print(", ".join(figures), flush=True)
        on_gpu.write(options.json, device, rows=rows)
    on_gpu.leave(rows)


def attempted(name: str, device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Yield the rows of a part. An error ends the part and is its last row."""
    try:
        for row in PARTS[name](device, sizes):
            yield {"part": name} | row
    except Exception as error:
        yield on_gpu.failed({"part": name}, error)


def products(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Products of a layer, forward, and those of SwiGLU's backward pass."""
    for model, (hidden, ffn, qkv, _) in sizes.shapes.items():
        x, g = random(device, sizes.tokens, hidden), random(device, sizes.tokens, ffn)
        gate, down = random(device, ffn, hidden), random(device, hidden, ffn)
        pairs = {
            "qkv": (x, random(device, qkv, hidden).T),
            "output": (x, random(device, hidden, hidden).T),
            "gate": (x, gate.T),
            "down": (g, down.T),
            "gate, input gradient": (g, gate),
            "down, input gradient": (x, down),
            "gate, weight gradient": (g.T, x),
            "down, weight gradient": (x.T, g),
        }
        for what, (a, b) in pairs.items():
            spent = milliseconds(partial(torch.matmul, a, b), device, sizes)
            yield {"model": model, "what": what, "ms": spent, "tflops_per_s": tflops(a, b, spent)}


def gradients(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """The weight gradient of the gate, added to fp32: as training does it, the product alone, and in one product."""
    for model, (hidden, ffn, _, _) in sizes.shapes.items():
        x, g = random(device, sizes.tokens, hidden), random(device, sizes.tokens, ffn)
        total = torch.zeros(ffn, hidden, device=device)

        def added(g: Tensor = g, x: Tensor = x, total: Tensor = total) -> None:
            total.add_((g.T @ x).to(torch.float32))

        def inside(g: Tensor = g, x: Tensor = x, total: Tensor = total) -> None:
            if device.type == "cuda":
                torch.addmm(total, g.T, x, out_dtype=torch.float32, out=total)
            else:  # a CPU has no product of bf16 into fp32
                total.addmm_(g.T.float(), x.float())

        ways: dict[str, Callable[[], object]]
        ways = {"added": added, "product": partial(torch.matmul, g.T, x), "inside": inside}
        for what, run in ways.items():
            yield {"model": model, "what": what, "ms": milliseconds(run, device, sizes)}


def fp8(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """The gate's product in FP8 with one scale a tensor: fast accumulation or not, and with both quantisations."""
    for model, (hidden, ffn, _, _) in sizes.shapes.items():
        x, weight = random(device, sizes.tokens, hidden), random(device, ffn, hidden)
        a, b = quantised(x), quantised(weight)
        for fast in (True, False):
            spent = milliseconds(partial(scaled, a, b, fast), device, sizes)
            what = f"{'fast' if fast else 'full'} accumulation"
            yield {"model": model, "what": what, "ms": spent, "tflops_per_s": tflops(x, weight.T, spent)}

        def whole(x: Tensor = x, weight: Tensor = weight) -> Tensor:
            return scaled(quantised(x), quantised(weight), fast=True)

        spent = milliseconds(whole, device, sizes)
        yield {"model": model, "what": "with quantisation", "ms": spent, "tflops_per_s": tflops(x, weight.T, spent)}


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor in FP8, and the fp32 scale by which it must be multiplied."""
    scale = x.abs().amax().float() / torch.finfo(FP8).max
    return (x / scale).to(FP8), scale


def scaled(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], fast: bool) -> Tensor:
    """The product a b^T of quantised matrices."""
    (x, of_x), (weight, of_weight) = a, b
    if x.device.type != "cuda":
        return (x.float() * of_x).to(DTYPE) @ (weight.float() * of_weight).to(DTYPE).T
    return torch._scaled_mm(x, weight.T, of_x, of_weight, out_dtype=DTYPE, use_fast_accum=fast)


def packs(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Attention of unequal packed sequences, as in half of the pairs of real plans, by each kernel that works here."""
    of = sizes.packs
    lengths = [of.of // 2 + (997 * number) % of.of for number in range(of.packed)]
    inputs, pairs = attention.tensors(sum(lengths), device, of), sum(n * (n + 1) / 2 for n in lengths)
    for kernel in attention.working_kernels(device, of):
        run = partial(attention.raw, kernel, attention.unsplit(lengths), inputs)
        for row in attention.measured("packs", kernel.name, f"{len(lengths)} unequal", pairs, run, device, of):
            yield {"what": row["kernel"], **{key: row[key] for key in row if key not in ("group", "kernel")}}


def loss(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """The head with its loss, both passes; `product_ms` is that of its forward product, of which there are three."""
    chosen = choose(device, DTYPE)
    for model, (hidden, _, _, vocab) in sizes.shapes.items():
        x, weight = (random(device, rows, hidden).requires_grad_() for rows in (sizes.tokens, vocab))
        labels = torch.randint(0, vocab, (sizes.tokens,), device=device)

        def run(x: Tensor = x, weight: Tensor = weight, labels: Tensor = labels) -> None:
            chosen.implementation(x, weight, labels, -100).backward()
            x.grad = weight.grad = None

        product = milliseconds(partial(torch.matmul, x.detach(), weight.detach().T), device, sizes)
        yield {"model": model, "what": chosen.name, "ms": milliseconds(run, device, sizes), "product_ms": product}


def update(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """AdamW in fp32: 28 bytes a parameter."""
    for fused in (False, True):
        parameter = torch.zeros(sizes.parameters, device=device, requires_grad=True)
        parameter.grad = torch.ones_like(parameter)
        spent = milliseconds(torch.optim.AdamW([parameter], fused=fused).step, device, sizes)
        what = "fused" if fused else "not fused"
        yield {"what": what, "ms": spent, "tb_per_s": 28 * sizes.parameters / spent / 1e9}


PARTS: dict[str, Callable[[torch.device, Sizes], Iterator[Row]]] = {
    "products": products,
    "gradients": gradients,
    "fp8": fp8,
    "packs": packs,
    "loss": loss,
    "update": update,
}


def random(device: torch.device, *size: int) -> Tensor:
    """A random matrix in bf16."""
    return torch.randn(size, device=device).to(DTYPE)


def tflops(a: Tensor, b: Tensor, ms: float) -> float:
    """The rate of a product that takes `ms` milliseconds."""
    return 2 * a.shape[0] * a.shape[1] * b.shape[1] / ms / 1e9


def milliseconds(run: Callable[[], object], device: torch.device, sizes: Sizes) -> float:
    """The median time of `run`, after a warm-up."""
    run(), run()
    return median(on_gpu.milliseconds(run, device) for _ in range(sizes.repeats))


if __name__ == "__main__":
    main()
