"""Times the work of a rank outside micro-batches: transfers, copies, optimizer updates, single linear layers.

`seconds` is always the approximate time to spend on a measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from engine.attention.comm import Comm, Exchange, Pending
from engine.config.schema import Model, Optimizer
from engine.config.units import counted
from engine.cost.sizes import optimizer_bytes
from engine.hardware.measured import Copies
from engine.hardware.timing import Run, interleaved, timed
from engine.parallel.groups import Groups
from engine.trainer.optimizer import build_optimizer

# Bytes. On GPUs the K,V and the dK,dV of a round have 30 to 100 MB.
TRANSFERS = {
    "cpu": (1 << 12, 1 << 16, 1 << 19, 1 << 22),
    "cuda": (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 26, 1 << 27),
}
_OVERLAPPED = {"cpu": 1 << 22, "cuda": 1 << 26}  # bytes of the message that a product hides
_HIDING = {"cpu": (512, torch.float32), "cuda": (4096, torch.bfloat16)}  # width and dtype of that product
_ROWS = 64  # rows of a product are a multiple of this, and at least as many
_BUFFER = 1 << 24  # elements: larger than caches
# Parameters of the update that measures memory. A GPU updates fewer in less time than launching the kernels takes.
_UPDATED = {"cpu": 1 << 22, "cuda": 1 << 27}
_SQUARE = {"cpu": (256, 512, 1024), "cuda": (4096, 8192)}  # widths of matrix products that reach the highest rate
_FULL = 256  # tokens with which a linear layer is limited by compute, not by reading its weights


def name(device: torch.device) -> str:
    """Return the name of the GPU, or the CPU's model and the threads of a rank."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else 'CPU'}, {counted(torch.get_num_threads(), 'thread')} per rank"


def transfers(comm: Comm, groups: Groups, seconds: float) -> tuple[tuple[int, float], ...]:
    """Time messages that ring neighbours exchange in both directions at once; return (bytes, seconds) of each size."""
    sizes = TRANSFERS[groups.device.type]
    runs = [timed(_to_neighbour(size, comm, groups).run, groups.device) for size in sizes]
    timings = interleaved(runs, groups, seconds)
    return tuple((size, timing.total_s) for size, timing in zip(sizes, timings, strict=True))


def overlap(comm: Comm, groups: Groups, seconds: float) -> float:
    """Measure which fraction, 0 to 1, of the shorter of a message and a matrix product is hidden behind the longer.

    The product [rows, width] x [width, width] has as many rows as take the time of the message: the fraction that a
    product of another duration hides says little about rings, whose transfers and blocks take similar times.
    """
    device, (width, dtype) = groups.device, _HIDING[groups.device.type]
    message = _to_neighbour(_OVERLAPPED[device.type], comm, groups)
    weight = torch.randn(width, width, device=device, dtype=dtype)

    def both(x: Tensor | None, send: bool) -> None:
        pending = message.post() if send else None
        if x is not None:
            torch.mm(x, weight)
        if pending is not None:
            pending.wait()

    def runs(x: Tensor) -> list[Run]:
        return [timed(partial(both, *what), device) for what in ((None, True), (x, False), (x, True))]

    times = [timing.total_s for timing in interleaved(runs(weight)[:2], groups, seconds / 3)]
    rows = rows_of_duration(times[0], times[1] / width)
    x = torch.randn(rows, width, device=device, dtype=dtype)
    alone, product, together = (timing.total_s for timing in interleaved(runs(x), groups, 2 * seconds / 3))
    return min(max((alone + product - together) / min(alone, product), 0.0), 1.0)


def rows_of_duration(seconds: float, seconds_per_row: float) -> int:
    """Return the rows of a product that takes `seconds`: a positive multiple of 64."""
    return _ROWS * max(1, round(seconds / seconds_per_row / _ROWS))


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


def copies(groups: Groups, seconds: float) -> Copies:
    """Measure copies from device to pinned host memory, back, and both at once; on a CPU rank, copies in memory.

    Each direction has its buffers and, on a GPU, its stream, as in offload. A CPU copies one after the other.
    """
    cuda = groups.device.type == "cuda"
    on_device = [torch.zeros(_BUFFER, device=groups.device) for _ in range(2)]
    on_host = [torch.zeros(_BUFFER, pin_memory=cuda) for _ in range(2)]
    ways = [(on_host[0], on_device[0]), (on_device[1], on_host[1])]
    streams = [torch.cuda.Stream(groups.device) if cuda else None for _ in ways]  # type: ignore[no-untyped-call]

    def copy(which: Sequence[int]) -> None:
        for way in which:
            target, source = ways[way]
            with torch.cuda.stream(streams[way]):  # does nothing for None
                target.copy_(source, non_blocking=True)

    runs = [timed(partial(copy, which), groups.device) for which in ((0,), (1,), (0, 1))]
    size = _BUFFER * on_host[0].element_size()
    return Copies(*(size / timing.total_s for timing in interleaved(runs, groups, seconds)))


def memory_bytes_per_s(settings: Optimizer, dtype: str, groups: Groups, seconds: float) -> float:
    """Measure the memory bandwidth of the optimizer's update, with bytes counted as in the cost model."""
    model = nn.Linear(_UPDATED[groups.device.type], 1, bias=False, device=groups.device)
    model.weight.grad = torch.zeros_like(model.weight)
    (timing,) = interleaved([timed(build_optimizer(model, settings).step, groups.device)], groups, seconds)
    return model.weight.numel() * optimizer_bytes(settings, dtype) / timing.total_s


class Message:
    """A message of `size` bytes to `next_rank`, while one of the same size arrives from `previous_rank`."""

    def __init__(self, size: int, comm: Comm, device: torch.device, next_rank: int, previous_rank: int) -> None:
        send = torch.zeros(size // 4, device=device)
        self._exchange = Exchange(send, next_rank, torch.empty_like(send), previous_rank)
        self._comm = comm

    def post(self) -> Pending:
        return self._comm.post([self._exchange])

    def run(self) -> None:
        self.post().wait()


def _to_neighbour(size: int, comm: Comm, groups: Groups) -> Message:
    """A message to the next rank of a ring of all ranks, and from the previous one."""
    rank, ranks = groups.hdp_rank, groups.mesh.hdp
    return Message(size, comm, groups.device, (rank + 1) % ranks, (rank - 1) % ranks)


def _product(inputs: int, outputs: int, tokens: int, dtype: torch.dtype, device: torch.device) -> Run:
    """Make a function that times the forward pass of a linear layer."""
    layer = nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype)
    return timed(torch.no_grad()(partial(layer, torch.randn(tokens, inputs, device=device, dtype=dtype))), device)
