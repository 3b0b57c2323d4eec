"""The peak memory of a rank."""

from __future__ import annotations

from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


def peak_bytes(device: torch.device, status: Path = _STATUS) -> int | None:
    """Return the peak memory of this process in bytes; None if unknown.

    This is the memory allocated for tensors if `device` is a GPU, else resident memory, which is read from `status`.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    lines = status.read_text().splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)
