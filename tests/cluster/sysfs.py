"""A folder in place of /sys, which says where processors and GPUs are."""

from __future__ import annotations

from pathlib import Path


def fake(sys: Path, nodes: list[str], gpus: dict[str, str]) -> Path:
    """Make a sysfs with the processors of each NUMA node, and the `numa_node` of each GPU."""
    for number, text in enumerate(nodes):
        node = sys / f"devices/system/node/node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{text}\n")
    for pci, text in gpus.items():
        place = sys / "bus/pci/devices" / pci
        place.mkdir(parents=True)
        (place / "numa_node").write_text(f"{text}\n")
    return sys
