"""Selects the attention kernel: the first that supports the device, is installed, and passes a numerical self-test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch

from engine.attention.kernels import cpu, cudnn, flash_attn, reference, self_test, torch_varlen
from engine.attention.kernels.call import Functions, Kernel
from engine.selection import Candidate, select


@dataclass(frozen=True)
class Entry:
    """A kernel and where it can run. `capability` and `largest_head` apply to CUDA kernels only."""

    title: str  # logged as the reason when it is selected
    load: Callable[..., Functions]
    package: str = "torch"  # "not installed" if this package is missing
    device: str = "cuda"  # or "cpu", or "any"
    capability: range = range(8, 100)  # major compute capabilities
    largest_head: int = 256  # elements of a head
    builds_plans: bool = False  # `load` takes the seconds that a plan for a new shape takes to build


# In order of preference. flash-attn 3 is before 4 because it was written for Hopper and leaves SMs to ring transfers.
KERNELS = {
    "fused_cpu": Entry("PyTorch's fused kernel for CPU", cpu.load, device="cpu"),
    "flash_attn_3": Entry("flash-attn 3", flash_attn.load_3, "flash_attn_interface", capability=range(9, 10)),
    "flash_attn_4": Entry("flash-attn 4", flash_attn.load_4, "flash_attn.cute.interface", capability=range(9, 12)),
    # Faster than flash-attn 2 on the GPUs that it is selected for.
    "cudnn": Entry(
        "cuDNN for shapes that come again, PyTorch's varlen flash kernel for others",
        cudnn.load,
        capability=range(9, 100),
        largest_head=128,
        builds_plans=True,
    ),
    "flash_attn_2": Entry("flash-attn 2", flash_attn.load_2, "flash_attn.flash_attn_interface"),
    "torch_varlen": Entry("PyTorch's varlen flash kernel", torch_varlen.load),
    "reference": Entry("no fused kernel works here", reference.load, device="any"),
}


@cache
def choose(
    device: torch.device, dtype: torch.dtype, head_dim: int, prefer: str | None = None, plan_build_s: float = 0.0
) -> Kernel:
    """Select the attention kernel for a device, dtype and head size, and log the reason. Cached.

    `plan_build_s` is the time in seconds in which cuDNN builds the execution plan of a new shape; with 0, each shape
    gets its plan at once.
    With `prefer`, tries only the kernel of this name; raises ValueError if it is unknown or does not work here.
    """

    def candidate(name: str, kernel: Entry) -> Candidate[Functions]:
        def test(functions: Functions) -> str | None:
            if functions == reference.load():
                return None  # the self-test compares with the reference
            tested = kernel.load(0.0) if kernel.builds_plans else functions
            return self_test.fault(tested, device, dtype, head_dim)

        reason = unsupported(kernel, device, dtype, head_dim)
        load = partial(kernel.load, plan_build_s) if kernel.builds_plans else kernel.load
        return Candidate(name, kernel.title, load, test, reason, kernel.package)

    what = f"attention kernel for {dtype}, head size {head_dim}"
    found = select(what, (candidate(*item) for item in KERNELS.items()), prefer)
    return Kernel(found.name, found.reason, *found.implementation, found.rejected)


def unsupported(kernel: Entry, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why a kernel cannot run on a device with this dtype and head size, or None if it can."""
    if kernel.device not in (device.type, "any"):
        return "runs on CPUs only" if kernel.device == "cpu" else "runs on CUDA devices only"
    if kernel.device != "cuda":
        return None
    if not torch.cuda.is_available():
        return "no CUDA device was found"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"does not support {dtype}"
    if head_dim % 8 or head_dim > kernel.largest_head:
        return f"does not support a head size of {head_dim}"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major in kernel.capability else f"does not support compute capability {major}.{minor}"
