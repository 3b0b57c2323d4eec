"""GPUs of this machine and whether PyTorch can use them, without importing torch, which takes seconds."""

from __future__ import annotations

import ctypes
import runpy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.errors import Problem


def visible_gpus() -> int:
    """Count the GPUs that a process started from here can use; 0 without a working NVIDIA driver.

    Asks the CUDA driver, so CUDA_VISIBLE_DEVICES has exactly the same effect as in the ranks.
    """
    cuda = _driver()
    count = ctypes.c_int()
    failed = cuda is None or cuda.cuDeviceGetCount(ctypes.byref(count))
    return 0 if failed else count.value


def least_gpu_memory() -> int | None:
    """Return the memory in bytes of the smallest GPU that a process started from here can use, as CUDA reports it.

    None if there is no GPU, or if the driver does not answer. Creates no CUDA context, which would itself take memory.
    """
    cuda, memories = _driver(), []
    for index in range(visible_gpus()):
        device, memory = ctypes.c_int(), ctypes.c_size_t()
        # _v2 has 64 bits for the size, the form without it 32.
        if cuda.cuDeviceGet(ctypes.byref(device), index) or cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device):
            return None
        memories.append(memory.value)
    return min(memories, default=None)


def driver_version() -> str | None:
    """Return the newest CUDA that the driver of this machine supports, such as 12.8; None without a working driver."""
    cuda, version = _driver(), ctypes.c_int()
    if cuda is None or cuda.cuDriverGetVersion(ctypes.byref(version)):
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"  # 12080 is 12.8


def pytorch_without_cuda() -> str | None:
    """Return the version of the installed PyTorch if it was built without CUDA, else None."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return None  # a rank reports the error when it imports it
    facts = runpy.run_path(str(Path(torch.origin).with_name("version.py")))
    return None if facts["cuda"] else str(facts["__version__"])


def unusable(pytorch: str, why: str) -> Problem:
    """Describe a GPU that this version of PyTorch cannot use."""
    hint = "install a PyTorch with CUDA that fits the driver: https://pytorch.org/get-started/locally"
    return Problem(f"PyTorch {pytorch} cannot use this machine's GPU: {why}", hint=hint)


def _driver() -> Any:
    """The library of the CUDA driver, initialised; None if there is none, or if it does not work."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None  # no NVIDIA driver is installed
    return None if cuda.cuInit(0) else cuda
