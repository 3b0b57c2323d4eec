"""Peak memory and time of the head's loss, in chunks and without, forward and backward, in float32 on a CPU.

`python benchmarks/loss.py [--tokens 8192 --vocab 128256 --hidden 256]`; the plain form needs 13 GB at this size. The
gradient of the head's weight is not included in the printed memory.
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
from engine.models.common.loss import choose

NAMES = ("plain", "chunks", "torch")
SCALE = 0.37  # applied to the summed loss, as the trainer does; any number


@dataclass(frozen=True)
class Measured:
    """One run: the summed loss, its gradients by x and by the head's weight, and the peak without the latter."""

    loss: Tensor
    dx: Tensor
    dweight: Tensor
    peak_bytes: int
    seconds: float


def main() -> None:
    """Print one line per form."""
    parser = argparse.ArgumentParser()
    for name, size in (("tokens", 8192), ("vocab", 128256), ("hidden", 256)):
        parser.add_argument(f"--{name}", type=int, default=size)
    sizes = parser.parse_args()
    measure("torch", 8, 8, 8)  # the first call imports modules for seconds
    plain = None
    for name in NAMES:
        found = measure(name, sizes.tokens, sizes.vocab, sizes.hidden)
        plain = plain or found
        memory = f"peak {found.peak_bytes / 1e9:.3f} GB, {100 * found.peak_bytes / plain.peak_bytes:.1f} % of plain"
        errors = ", ".join(f"{what} {error:.1e}" for what, error in differences(found, plain).items())
        print(f"{name}: {memory}, {found.seconds:.1f} s; differences: {errors}", flush=True)


def measure(name: str, tokens: int, vocab: int, hidden: int, dtype: torch.dtype = torch.float32) -> Measured:
    """Run one form of the loss, such as `plain`, forward and backward; all forms get the same random inputs."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=random).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, hidden, generator=random) * 0.1).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), generator=random)
    form = choose(x.device, dtype, name).implementation

    def run() -> tuple[Tensor, ...]:
        loss = form(x, weight, labels, -100)
        return loss.detach(), *torch.autograd.grad(loss * SCALE, (x, weight))

    began = time.perf_counter()
    peak, (loss, dx, dweight) = peak_bytes(run)
    return Measured(loss, dx, dweight, peak - dweight.nbytes, time.perf_counter() - began)


def peak_bytes(run: Callable[[], tuple[Tensor, ...]]) -> tuple[int, tuple[Tensor, ...]]:
    """Peak bytes that PyTorch's allocator held in addition to those before the run, and the result of the run."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(accumulate(size for _, size in changes)), result


def differences(found: Measured, plain: Measured) -> dict[str, float]:
    """Relative error max|a - b| / max|b| of the loss and of each gradient."""
    pairs = {"loss": (found.loss, plain.loss), "x": (found.dx, plain.dx), "weight": (found.dweight, plain.dweight)}
    return {what: error(*pair) for what, pair in pairs.items()}


if __name__ == "__main__":
    main()
