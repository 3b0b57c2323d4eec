"""A folder in place of /sys, which says where processors and GPUs are, and which network cards there are."""

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


def with_cards(sys: Path, ports: dict[str, tuple[str, str, float]]) -> Path:
    """Add ports of network cards, such as mlx5_0:1, with their state, link layer and Gb/s."""
    (sys / "class/infiniband").mkdir(parents=True, exist_ok=True)
    for name, (state, layer, rate) in ports.items():
        card, _, number = name.partition(":")
        place = sys / "class/infiniband" / card / "ports" / number
        place.mkdir(parents=True)
        (place / "state").write_text(f"{'4' if state == 'ACTIVE' else '1'}: {state}\n")
        (place / "link_layer").write_text(f"{layer}\n")
        (place / "rate").write_text(f"{rate:g} Gb/sec (4X NDR)\n")
    return sys
