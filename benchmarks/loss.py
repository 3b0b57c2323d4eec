"""Peak memory and time of the head's loss, in chunks and without, forward and backward, in float32 on a CPU.

`python benchmarks/loss.py [FORM] [--tokens 8192 --vocab 128256 --hidden 256]`; the plain form needs 13 GB at this size.
The gradient of the head's weight is not included in the printed memory.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import driver
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


def options(parser: argparse.ArgumentParser) -> None:
    for name, size in (("tokens", 8192), ("vocab", 128256), ("hidden", 256)):
        parser.add_argument(f"--{name}", type=int, default=size)


def cases(arguments: argparse.Namespace) -> Iterator[driver.Case]:
    measure("torch", 8, 8, 8)  # the first call imports modules for seconds
    plain = list[Measured]()
    for name in NAMES:
        yield name, partial(row, name, (arguments.tokens, arguments.vocab, arguments.hidden), plain)


def row(name: str, sizes: tuple[int, int, int], plain: list[Measured]) -> Iterator[driver.Row]:
    """Yield the row of a form. The first form that ran, kept in `plain`, is the one to compare with."""
    found = measure(name, *sizes)
    plain.append(found)
    errors = {f"difference_{what}": error for what, error in differences(found, plain[0]).items()}
    over = found.peak_bytes / plain[0].peak_bytes
    yield {"form": name, "peak_gb": found.peak_bytes / 1e9, "peak_over_first": over, "s": found.seconds, **errors}


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
    sys.exit(driver.main(__doc__, cases, options))
