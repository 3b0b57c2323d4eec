"""Counts the GPUs of this machine without importing torch, which takes seconds."""

from __future__ import annotations

import ctypes


def visible_gpus() -> int:
    """Count the GPUs that a process started from here can use; 0 without a working NVIDIA driver.

    Asks the CUDA driver, so CUDA_VISIBLE_DEVICES has exactly the same effect as in the ranks.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0  # no NVIDIA driver is installed
    count = ctypes.c_int()
    failed = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    return 0 if failed else count.value
