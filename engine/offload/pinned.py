"""Allocates pinned host memory on the NUMA node of a device."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

_SYS = Path("/sys")


def allocate(size: int, device: torch.device) -> Tensor:
    """Allocate uint8 [size] of host memory, pinned if the device is a GPU. Raises RuntimeError if that fails.

    The memory is unpinned when the returned tensor and all views of it are gone. PyTorch's `pin_memory` is not used
    because it rounds the size up to a power of two.
    """
    block = torch.empty(size, dtype=torch.uint8)
    if device.type == "cuda" and size:
        # Pinning places pages on the NUMA node of the CPU that pins them. So this thread moves to the device's node
        # meanwhile. If the system refuses, copies are only slower.
        allowed = os.sched_getaffinity(0)
        with suppress(OSError):
            os.sched_setaffinity(0, allowed & processors(torch.cuda.get_device_properties(device)) or allowed)
        try:
            failed = int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), size, 0))
        finally:
            with suppress(OSError):
                os.sched_setaffinity(0, allowed)
        if failed:
            with suppress(RuntimeError):  # clears the CUDA error, which the next operation would otherwise raise
                torch.zeros(1, device=device)
        torch.cuda.check_error(failed)
        weakref.finalize(block, _unpin, block.data_ptr(), device).atexit = False
    return block


def _unpin(address: int, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # a copy may be in progress
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(address)))


def processors(properties: object, sys: Path = _SYS) -> set[int]:
    """Return the CPU numbers of the NUMA node of a GPU; empty if unknown.

    `properties` are its `torch.cuda.get_device_properties`, `sys` is the folder of sysfs.
    """
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    domain, bus, number = (getattr(properties, name, None) for name in names)
    try:
        place = sys / "bus" / "pci" / "devices" / f"{domain:04x}:{bus:02x}:{number:02x}.0"
        node = int((place / "numa_node").read_text())
        listed = (sys / "devices" / "system" / "node" / f"node{node}" / "cpulist").read_text()  # such as 0-3,8
        ranges = [part.split("-") for part in listed.strip().split(",") if part]
        return {number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)}
    except (OSError, ValueError, TypeError):
        return set()
