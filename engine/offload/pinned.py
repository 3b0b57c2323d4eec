"""Allocates pinned host memory on the NUMA node of a device."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress

import torch
from torch import Tensor

from engine.cluster.numa import node_of, processors_of


def allocate(size: int, device: torch.device) -> Tensor:
    """Allocate uint8 [size] of host memory, pinned if the device is a GPU. Raises RuntimeError if that fails.

    The memory is unpinned when the returned tensor and all views of it are gone. PyTorch's `pin_memory` is not used
    because it rounds the size up to a power of two.
    """
    block = torch.empty(size, dtype=torch.uint8)
    if device.type == "cuda" and size:
        # Pinning places pages on the NUMA node of the CPU that pins them. A rank that is not bound to the device's node
        # moves there meanwhile. If the system refuses, copies are only slower.
        allowed = os.sched_getaffinity(0)
        with suppress(OSError):
            os.sched_setaffinity(0, allowed & processors_of(node_of(_place(device))) or allowed)
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


def _place(device: torch.device) -> str:
    """Return the folder of a GPU in /sys/bus/pci/devices; empty if PyTorch does not name it."""
    properties = torch.cuda.get_device_properties(device)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    numbers = [number for name in names if (number := getattr(properties, name, None)) is not None]
    return "{:04x}:{:02x}:{:02x}.0".format(*numbers) if len(numbers) == len(names) else ""
