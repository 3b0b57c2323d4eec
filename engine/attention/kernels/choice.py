"""Which kernel attends: the first of a list that is there, runs on this device, and gives the reference's numbers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch

from engine.attention.kernels import cpu, cudnn, flash_attn, reference, self_test, torch_varlen
from engine.attention.kernels.call import Functions, Kernel
from engine.close import in_a_line

_LOG = logging.getLogger(__name__)


class _Where(NamedTuple):
    device: torch.device
    dtype: torch.dtype
    head_dim: int


@dataclass(frozen=True)
class _Candidate:
    """A kernel that may be chosen. `unfit` says why it does not run somewhere; `load` raises where it is not installed.

    `rehearse` gives the functions that the self-test calls, where they are not those of `load`.
    """

    title: str
    unfit: Callable[[_Where], str | None]
    load: Callable[[], Functions]
    package: str = "torch"
    rehearse: Callable[[], Functions] | None = None


def _unfit_for_cpu(where: _Where) -> str | None:
    return None if where.device.type == "cpu" else "is for CPU"


def _unfit_for_gpu(where: _Where, least: int, most: int = 99, largest_head: int = 256) -> str | None:
    """Return why a flash kernel for GPUs of compute capability `least`.x to `most`.x does not run."""
    if where.device.type != "cuda":
        return "is for CUDA devices"
    if not torch.cuda.is_available():
        return "finds no CUDA device"
    if where.dtype not in (torch.bfloat16, torch.float16):
        return f"takes no {where.dtype}"
    if where.head_dim % 8 or where.head_dim > largest_head:
        return f"takes no head size of {where.head_dim}"
    major, minor = torch.cuda.get_device_capability(where.device)
    return None if least <= major <= most else f"does not run on compute capability {major}.{minor}"


_CANDIDATES = {
    "fused_cpu": _Candidate("PyTorch's fused kernel for CPU", _unfit_for_cpu, cpu.load),
    "flash_attn_4": _Candidate(
        "flash-attn 4", partial(_unfit_for_gpu, least=9, most=11), flash_attn.load_4, "flash_attn.cute.interface"
    ),
    "flash_attn_3": _Candidate(
        "flash-attn 3", partial(_unfit_for_gpu, least=9, most=9), flash_attn.load_3, "flash_attn_interface"
    ),
    # Faster than flash-attn 2 where the hardware is newer than that.
    "cudnn": _Candidate(
        "cuDNN for sequences of one length, PyTorch's varlen flash kernel for others",
        partial(_unfit_for_gpu, least=9, largest_head=128),
        cudnn.load,
        rehearse=cudnn.load_for_any_length,
    ),
    "flash_attn_2": _Candidate(
        "flash-attn 2", partial(_unfit_for_gpu, least=8), flash_attn.load_2, "flash_attn.flash_attn_interface"
    ),
    "torch_varlen": _Candidate("PyTorch's varlen flash kernel", partial(_unfit_for_gpu, least=8), torch_varlen.load),
}
NAMES = (*_CANDIDATES, "reference")  # in order of preference


@cache
def choose(device: torch.device, dtype: torch.dtype, head_dim: int, prefer: str | None = None) -> Kernel:
    """Return the kernel for a device, dtype and head size, and log the reason once. `prefer` forces one by name.

    Raises ValueError where the preferred one does not run.
    """
    where, passed_over = _Where(device, dtype, head_dim), list[str]()
    for name in NAMES if prefer is None else (prefer,):
        kernel = _kernel(name, where, tuple(passed_over), asked=prefer is not None)
        if isinstance(kernel, Kernel):
            _LOG.info("attention kernel for %s, head size %d: %s (%s)", dtype, head_dim, kernel.name, kernel.reason)
            return kernel
        passed_over.append(f"{name}: {kernel}")
    raise ValueError(f"no kernel {prefer!r} for {device.type}: it {kernel}")


def _kernel(name: str, where: _Where, passed_over: tuple[str, ...], asked: bool) -> Kernel | str:
    """Return a kernel, or why it is not to be had."""
    if name == "reference":
        reason = "asked for" if asked else "no fused kernel runs here"
        return Kernel(name, reason, *reference.load(), passed_over)
    candidate = _CANDIDATES.get(name)
    if candidate is None:
        return "is not known"
    found = candidate.unfit(where) or _tried(name, candidate, where)
    return found if isinstance(found, str) else Kernel(name, candidate.title, *found, passed_over)


def _tried(name: str, candidate: _Candidate, where: _Where) -> Functions | str:
    """Load a kernel and test it; return why not if it fails. One that is installed but broken is worth a warning."""
    try:
        functions = candidate.load()
        wrong = self_test.fault(candidate.rehearse() if candidate.rehearse else functions, *where)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{candidate.package}.".startswith(f"{error.name}."):
            return "is not installed"
        wrong = in_a_line(error)
    except _faults() as error:
        wrong = in_a_line(error)
    if wrong is None:
        return functions
    _LOG.warning("attention kernel %s is installed but broken, another one is used: %s", name, wrong)
    return f"is installed but broken: {wrong}"


def _faults() -> tuple[type[Exception], ...]:
    """Return what other people's kernels raise when they cannot be loaded, compiled or called.

    The errors of the compiler that flash-attn 4 brings derive from Exception alone.
    """
    compiler = getattr(sys.modules.get("cutlass.base_dsl.common"), "DSLBaseError", RuntimeError)
    broken_code = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
    return ImportError, OSError, RuntimeError, compiler, *broken_code
