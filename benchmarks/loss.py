"""Peak memory and time of the head's loss, chunked and plain, forward and backward, in float32 on CPU.

The gradient of the head's weight is in both, and left out of what is printed. `python benchmarks/loss.py
[--tokens 8192 --vocab 128256 --hidden 256]`; the plain form takes 13 GB there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from engine.close import error
from engine.models.loss import choose

NAMES = ("plain", "chunks", "torch")
SCALE = 0.37  # applied afterwards, as the trainer does


@dataclass(frozen=True)
class Measured:
    """One run: the summed loss, its gradients by x and by the weight, peak bytes without the latter, and seconds."""

    loss: Tensor
    dx: Tensor
    dweight: Tensor
    peak_bytes: int
    seconds: float


def main() -> None:
    """Print one line a form, in which the shares are of the plain form's."""
    parser = argparse.ArgumentParser()
    for name, size in (("tokens", 8192), ("vocab", 128256), ("hidden", 256)):
        parser.add_argument(f"--{name}", type=int, default=size)
    sizes = parser.parse_args()
    measure("torch", 8, 8, 8)  # loads what its first call loads
    plain = None
    for name in NAMES:
        found = measure(name, sizes.tokens, sizes.vocab, sizes.hidden)
        plain = plain or found
        memory = f"peak {found.peak_bytes / 1e9:.3f} GB, {100 * found.peak_bytes / plain.peak_bytes:.1f} % of plain"
        errors = ", ".join(f"{what} {error:.1e}" for what, error in differences(found, plain).items())
        print(f"{name}: {memory}, {found.seconds:.1f} s; differences: {errors}", flush=True)


def measure(name: str, tokens: int, vocab: int, hidden: int, dtype: torch.dtype = torch.float32) -> Measured:
    """Run one form of the loss on random numbers that are the same for all forms."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=random).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, hidden, generator=random) * 0.1).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), generator=random)
    form = choose(x.device, dtype, name).sum

    def run() -> tuple[Tensor, Tensor, Tensor]:
        loss = form(x, weight, labels, -100)
        return loss.detach(), *torch.autograd.grad(loss * SCALE, (x, weight))

    began = time.perf_counter()
    peak, (loss, dx, dweight) = peak_bytes(run)
    return Measured(loss, dx, dweight, peak - dweight.nbytes, time.perf_counter() - began)


def peak_bytes(run: Callable[[], tuple[Tensor, ...]]) -> tuple[int, tuple[Tensor, ...]]:
    """Return the most bytes that PyTorch's allocator held at a time beside what was there before, and the result."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(accumulate(size for _, size in changes)), result


def differences(found: Measured, plain: Measured) -> dict[str, float]:
    """Return max|a - b| / max|b| of the loss and its gradients."""
    pairs = {"loss": (found.loss, plain.loss), "x": (found.dx, plain.dx), "weight": (found.dweight, plain.dweight)}
    return {what: error(*pair) for what, pair in pairs.items()}


if __name__ == "__main__":
    main()
