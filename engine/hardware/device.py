"""Times the work of a rank outside micro-batches: transfers, copies, optimizer updates, single linear layers.

`seconds` is always the approximate time to spend on a measurement.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import nn

from engine.attention.comm import Exchange, Pending
from engine.config.schema import Model, Optimizer
from engine.cost.sizes import update_bytes
from engine.hardware.timing import Run, interleaved, timed
from engine.parallel.groups import Groups
from engine.trainer.optimizer import build_optimizer
from engine.trainer.step import RankContext

TRANSFERS = (1 << 12, 1 << 16, 1 << 19, 1 << 22)  # bytes
_OVERLAPPED = {"cpu": (1 << 22, 512), "cuda": (1 << 28, 8192)}  # bytes of a message, width of a product: equal times
_BUFFER = 1 << 24  # elements: larger than caches
_SQUARE = {"cpu": (256, 512, 1024), "cuda": (4096, 8192)}  # widths of matrix products that reach the highest rate
_FULL = 256  # tokens with which a linear layer is limited by compute, not by reading its weights


def name(device: torch.device) -> str:
    """Return the name of the GPU, or the CPU's model and the threads of a rank."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else 'CPU'}, {torch.get_num_threads()} threads per rank"


def transfers(context: RankContext, groups: Groups, seconds: float) -> tuple[tuple[int, float], ...]:
    """Time messages that ring neighbours exchange in both directions at once; return (bytes, seconds) of each size."""
    runs = [timed(_Exchange(size, context, groups).run, groups.device) for size in TRANSFERS]
    timings = interleaved(runs, groups, seconds)
    return tuple((size, timing.total_s) for size, timing in zip(TRANSFERS, timings, strict=False))


def overlap(context: RankContext, groups: Groups, seconds: float) -> float:
    """Measure which fraction, 0 to 1, of the shorter of a message and a matrix product is hidden behind the longer."""
    size, width = _OVERLAPPED[groups.device.type]
    exchange, x = _Exchange(size, context, groups), torch.randn(width, width, device=groups.device)

    def both(send: bool, compute: bool) -> None:
        pending = exchange.post() if send else None
        if compute:
            torch.mm(x, x)
        if pending is not None:
            pending.wait()

    runs = [timed(partial(both, *what), groups.device) for what in ((True, False), (False, True), (True, True))]
    message, product, together = (timing.total_s for timing in interleaved(runs, groups, seconds))
    return min(max((message + product - together) / min(message, product), 0.0), 1.0)


def half_tokens(shape: Model, dtype: torch.dtype, groups: Groups, seconds: float) -> float:
    """Measure how many tokens a linear layer computes in the time in which it reads its weights.

    A layer with t tokens takes T(t) = launch + (t + half) u, with u seconds per token. Measured are T(1), T(256) and
    `launch`, the time of a layer with a single weight; `half` is returned, or 0 if the times do not give it.
    """
    sizes = ((1, 1, 1), (shape.hidden, shape.ffn, 1), (shape.hidden, shape.ffn, _FULL))
    runs = [_product(*size, dtype, groups.device) for size in sizes]
    launch, one, full = (timing.total_s for timing in interleaved(runs, groups, seconds))
    return max(0.0, (one - launch) / ((full - one) / (_FULL - 1)) - 1) if full > one else 0.0


def product_flops_per_s(dtype: torch.dtype, groups: Groups, seconds: float) -> float:
    """Measure the highest FLOP/s of square matrix products, the peak of a device that has no data sheet."""
    widths = _SQUARE[groups.device.type]
    timings = interleaved([_product(width, width, width, dtype, groups.device) for width in widths], groups, seconds)
    return max(2 * width**3 / timing.total_s for width, timing in zip(widths, timings, strict=True))


def copy_bytes_per_s(groups: Groups, seconds: float) -> float:
    """Measure the rate of copies from device to pinned host memory; on a CPU rank, of copies in memory."""
    source = torch.zeros(_BUFFER, device=groups.device)
    target = torch.zeros(_BUFFER, pin_memory=groups.device.type == "cuda")
    run = timed(lambda: target.copy_(source, non_blocking=True), groups.device)
    (timing,) = interleaved([run], groups, seconds)
    return source.numel() * source.element_size() / timing.total_s


def memory_bytes_per_s(settings: Optimizer, dtype: str, groups: Groups, seconds: float) -> float:
    """Measure the memory bandwidth of the optimizer's update, with bytes counted as in the cost model."""
    model = nn.Linear(_BUFFER // 4, 1, bias=False, device=groups.device)
    model.weight.grad = torch.zeros_like(model.weight)
    (timing,) = interleaved([timed(build_optimizer(model, settings).step, groups.device)], groups, seconds)
    return model.weight.numel() * update_bytes(settings, dtype) / timing.total_s


class _Exchange:
    """A message of `size` bytes to the next rank, while one from the previous rank arrives."""

    def __init__(self, size: int, context: RankContext, groups: Groups) -> None:
        send = torch.zeros(size // 4, device=groups.device)
        following, previous = (groups.hdp_rank + 1) % groups.mesh.hdp, (groups.hdp_rank - 1) % groups.mesh.hdp
        self._exchange = Exchange(send, following, torch.empty_like(send), previous)
        self._comm = context.comm

    def post(self) -> Pending:
        return self._comm.post([self._exchange])

    def run(self) -> None:
        self.post().wait()


def _product(inputs: int, outputs: int, tokens: int, dtype: torch.dtype, device: torch.device) -> Run:
    """Make a function that times the forward pass of a linear layer."""
    layer = nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype)
    return timed(torch.no_grad()(partial(layer, torch.randn(tokens, inputs, device=device, dtype=dtype))), device)
