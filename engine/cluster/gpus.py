"""GPUs of this machine and whether PyTorch can use them, without importing torch, which takes seconds.

`python -m engine.cluster.gpus` prints the GPUs that its process sees.
"""

from __future__ import annotations

import ctypes
import json
import runpy
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import Problem
from engine.readers import parse_line

_ANSWER_S = 15.0  # for the driver: without its persistence mode it first wakes each GPU
_KILLED_S = 1.0
_DMA_BUF = 124  # CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED


class Gpu(NamedTuple):
    """A GPU as the CUDA driver describes it."""

    name: str
    pci: str  # its folder in /sys/bus/pci/devices, such as 0000:3b:00.0


def gpus() -> list[Gpu]:
    """Return the GPUs that a process started from here can use, in CUDA's order. Empty text is not known."""
    cuda, found = _driver(), list[Gpu]()
    for index in range(visible_gpus()):
        device, texts = ctypes.c_int(), list[str]()
        failed = cuda.cuDeviceGet(ctypes.byref(device), index)
        for ask in (cuda.cuDeviceGetName, cuda.cuDeviceGetPCIBusId):
            text = ctypes.create_string_buffer(128)
            texts.append("" if failed or ask(text, len(text), device) else text.value.decode(errors="replace"))
        found.append(Gpu(texts[0], texts[1].lower()))
    return found


def gpus_seen(environment: Mapping[str, str]) -> list[Gpu] | None:
    """Return the GPUs that a process with these variables can use; None if the driver does not answer.

    A new process asks: the driver of this one would answer from memory about a GPU that was lost, and never ends a call
    about a broken one.
    """
    program, quiet = [sys.executable, "-m", "engine.cluster.gpus"], subprocess.DEVNULL
    with suppress(OSError, ValueError, subprocess.TimeoutExpired):
        process = subprocess.Popen(program, env=dict(environment), stdin=quiet, stdout=subprocess.PIPE, stderr=quiet)
        try:
            return [Gpu(*one) for one in parse_line(process.communicate(timeout=_ANSWER_S)[0])]
        finally:
            process.kill()
            assert process.stdout is not None
            process.stdout.close()
            with suppress(subprocess.TimeoutExpired):  # the kernel cannot end a process inside a driver that hangs
                process.wait(_KILLED_S)
    return None


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


def exports_dma_buf() -> bool:
    """Whether the driver lets network cards use the memory of all GPUs of a process started from here as a dma-buf."""
    cuda, found = _driver(), list[int]()
    for index in range(visible_gpus()):
        device, value = ctypes.c_int(), ctypes.c_int()
        if not cuda.cuDeviceGet(ctypes.byref(device), index):
            cuda.cuDeviceGetAttribute(ctypes.byref(value), _DMA_BUF, device)
        found.append(value.value)
    return bool(found) and all(found)


def driver_error() -> int:
    """Return the CUDA error of the driver's start, such as 802; 0 if it works, or if there is none."""
    try:
        return int(ctypes.CDLL("libcuda.so.1").cuInit(0))
    except OSError:
        return 0


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
    """Describe a GPU of this host that this version of PyTorch cannot use."""
    hint = "install a PyTorch with CUDA that fits the driver: https://pytorch.org/get-started/locally"
    return Problem(f"PyTorch {pytorch} cannot use the GPU of {socket.gethostname()}: {why}", hint=hint)


def _driver() -> Any:
    """The library of the CUDA driver, initialised; None if there is none, or if it does not work."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None  # no NVIDIA driver is installed
    return None if cuda.cuInit(0) else cuda


if __name__ == "__main__":
    print(json.dumps(gpus()))
