"""The most memory that a rank has held so far, as its device counts it: what `estimate-memory` is checked against."""

from __future__ import annotations

from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


def peak_bytes(device: torch.device, status: Path = _STATUS) -> int | None:
    """Return bytes: of a GPU those of tensors, of a CPU process all that was resident; None where nobody says."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    lines = status.read_text().splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)
