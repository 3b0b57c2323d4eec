"""Bytes of the host near a device, which it can copy to and from while it computes: pinned pages."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

_SYS = Path("/sys")


def allocate(size: int, device: torch.device) -> Tensor:
    """Return uint8 [size] for copies with a device. Raises RuntimeError where the host does not give so much.

    PyTorch's own pinned memory comes in powers of two, nearly twice what is asked for. Pages are taken when they are
    pinned, so that is done near the device. They stay pinned as long as what is returned lives, or a part of it.
    """
    block = torch.empty(size, dtype=torch.uint8)
    if device.type == "cuda" and size:
        with _near(device):
            failed = int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), size, 0))
        if failed:
            with suppress(RuntimeError):  # CUDA keeps the error, and would give it to whatever is computed next
                torch.zeros(1, device=device)
        torch.cuda.check_error(failed)
        weakref.finalize(block, _unpin, block.data_ptr(), device).atexit = False
    return block


def _unpin(address: int, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # a copy may be under way
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(address)))


@contextmanager
def _near(device: torch.device) -> Iterator[None]:
    """Run this thread where memory that it touches first is the device's own: on the processors of its NUMA node."""
    allowed = os.sched_getaffinity(0)
    with suppress(OSError):  # it is only for speed
        os.sched_setaffinity(0, allowed & processors(torch.cuda.get_device_properties(device)) or allowed)
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, allowed)


def processors(properties: object, sys: Path = _SYS) -> set[int]:
    """Return the processors of the NUMA node that a PCI device is at; none where the system does not say."""
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    domain, bus, number = (getattr(properties, name, None) for name in names)
    try:
        place = sys / "bus" / "pci" / "devices" / f"{domain:04x}:{bus:02x}:{number:02x}.0"
        node = int((place / "numa_node").read_text())
        return _numbers((sys / "devices" / "system" / "node" / f"node{node}" / "cpulist").read_text())
    except (OSError, ValueError, TypeError):
        return set()


def _numbers(text: str) -> set[int]:
    """Return the numbers of a list such as 0-3,8."""
    ends = [part.split("-") for part in text.strip().split(",") if part]
    return {number for part in ends for number in range(int(part[0]), int(part[-1]) + 1)}
