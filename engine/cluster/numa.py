"""Which processors a rank should run on: those of its GPU's NUMA node, by the folders of sysfs. Imports no torch.

A host with two sockets has a NUMA node for each. From the other socket, launching kernels and copies to the GPU are
slower.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

SYS = Path("/sys")

# Fewer processors make a rank slower than those of the other node do: it has a thread each for the forward pass, the
# backward pass and NCCL, and compiles kernels.
_LEAST = 4


def node_of(pci: str) -> int | None:
    """Return the NUMA node of a device, whose folder in /sys/bus/pci/devices is given; None if it is not known."""
    try:
        node = int((SYS / "bus/pci/devices" / pci / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def processors_of(node: int | None) -> set[int]:
    """Return the processors of a NUMA node; empty if they are not known."""
    try:
        listed = (SYS / f"devices/system/node/node{node}/cpulist").read_text()  # such as 0-3,8
        ranges = [part.split("-") for part in listed.strip().split(",") if part]
        return {number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)}
    except (OSError, ValueError):
        return set()


def spans_nodes(processors: set[int]) -> bool:
    """Return whether processors are on several NUMA nodes, as far as is known."""
    numbers = [int(path.name.removeprefix("node")) for path in (SYS / "devices/system/node").glob("node[0-9]*")]
    return bool(numbers) and not any(processors <= processors_of(number) for number in numbers)


def of_ranks(gpus: Sequence[str], allowed: set[int]) -> list[set[int]]:
    """Return the processors of each rank of a host, from the place of its GPU as for `node_of`.

    They are those of `allowed`, which this process may use, that are on the GPU's node; ranks of a node share them. A
    rank gets all of `allowed` if the node is not known, or if it would leave few processors for each of its ranks.
    """
    nodes = [node_of(pci) for pci in gpus]
    enough, found = min(_LEAST, len(allowed) // max(len(gpus), 1)), []
    for node in nodes:
        near = allowed & processors_of(node)
        found.append(near if near and len(near) // nodes.count(node) >= enough else allowed)
    return found


def listed(numbers: Iterable[int]) -> str:
    """Write numbers as Linux does, such as 0-3,8."""
    ranges = list[list[int]]()
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in ranges)
