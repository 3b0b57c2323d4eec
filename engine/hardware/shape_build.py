"""What attention's first call with a shape costs: cuDNN builds an execution plan for each, other kernels may compile.

Execution plans are cached per thread. Steps of training have new shapes again and again, so the cost recurs.
"""

from __future__ import annotations

from statistics import median

import torch

from engine.attention.kernels import cudnn, reference
from engine.attention.kernels.call import Call, Functions, Kernel
from engine.config.schema import Model
from engine.hardware.timing import Stopwatch
from engine.parallel.groups import Groups

# Tokens: lengths that no other measurement uses.
_LENGTHS = {"cpu": (251, 383), "cuda": (4097, 5003, 8200)}


def builder(kernel: Kernel) -> Functions:
    """Return the functions whose first calls are measured: with cuDNN, those that use it whatever the length."""
    return cudnn.load(0.0) if kernel.name == "cudnn" else Functions(kernel.forward, kernel.backward)


def shape_build_s(functions: Functions, shape: Model, dtype: torch.dtype, groups: Groups) -> tuple[float, float]:
    """Return the seconds that the first call with a shape takes longer than the next, forward and backward.

    Median over several lengths of one causal sequence, then the slowest rank's; at least 0. It is 0 for the reference
    kernel, which prepares nothing, and whose scores of the longest sequence may not fit.
    """
    if functions == reference.load():
        return 0.0, 0.0
    watch = Stopwatch(groups.device)
    extra = []
    for length in _LENGTHS[groups.device.type]:
        heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
        q, k, v, dout = (
            torch.randn(length, count, shape.head_dim, device=groups.device, dtype=dtype) for count in heads
        )
        call, times = Call((0, length), (0, length), causal=True), []
        for _ in range(2):
            began = watch.now()
            out, lse = functions.forward(q, k, v, call)
            middle = watch.now()
            functions.backward(dout, q, k, v, out, lse, call)
            times.append((middle - began, watch.now() - middle))
        extra.append([first - second for first, second in zip(*times, strict=True)])
    forward, backward = (max(0.0, median(found)) for found in zip(*extra, strict=True))
    slowest = groups.control.largest(forward, backward)
    return slowest[0], slowest[1]
