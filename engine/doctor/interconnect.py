"""Checks what connects GPUs: network cards between hosts, their direct way to GPU memory, and NVSwitches in a host.

Reads what NCCL reads, in /sys; nothing is sent. Imports no torch.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from engine.cluster.gpus import driver_error, exports_dma_buf
from engine.config.units import counted
from engine.doctor.check import Check, failed, ok, skipped, warning
from engine.launch.checks.ready import Need

SYS, DEV, PROC = Path("/sys"), Path("/dev"), Path("/proc")
IB_VARIABLES = ("NCCL_IB_HCA", "NCCL_IB_DISABLE")
NAME = "InfiniBand"
_ACTIVE = "ACTIVE"
_LAYERS = {"InfiniBand": "InfiniBand", "Ethernet": "RoCE", "Unspecified": "EFA"}  # by link layer; EFA is that of AWS
# NCCL looks for the first four (src/transport/net_ib), each of a version of the module nvidia_peermem.
_PEER_MEMORY = (
    "module/nvidia_peermem/version",
    "kernel/mm/memory_peers/nv_mem/version",
    "kernel/mm/memory_peers/nv_mem_nc/version",
    "kernel/mm/memory_peers/nvidia-peermem/version",
)
_NOT_READY = 802  # CUDA_ERROR_SYSTEM_NOT_READY: on machines with NVSwitches, the fabric manager has not run
_MANAGER = "nv-fabricmanage"  # its name in /proc, where names have 15 characters
_ANSWER_S = 15.0


class Port(NamedTuple):
    """A port of a network card with RDMA."""

    card: str  # such as mlx5_0
    number: int
    state: str  # such as ACTIVE or DOWN
    layer: str  # InfiniBand, Ethernet or Unspecified
    gbit_s: float

    def __str__(self) -> str:
        return f"{self.card}:{self.number}"


def ports() -> list[Port]:
    """Return the ports of this host's cards."""
    found = []
    for place in sorted((SYS / "class/infiniband").glob("*/ports/*")):
        with suppress(OSError, ValueError, IndexError):  # the card has just gone
            # Such as `4: ACTIVE`, `InfiniBand` and `400 Gb/sec (4X NDR)`.
            state, layer, rate = ((place / name).read_text().strip() for name in ("state", "link_layer", "rate"))
            words = state.rpartition(": ")[2], layer, float(rate.split()[0])
            found.append(Port(place.parts[-3], int(place.name), *words))
    return found


def selected(found: Sequence[Port], variable: str | None) -> list[Port]:
    """Return the ports that NCCL_IB_HCA leaves: names begin with one of its texts, are one (=), or neither (^)."""
    text = variable or ""
    without, exact = text.startswith("^"), text.removeprefix("^").startswith("=")
    wanted = [one.partition(":") for one in text.removeprefix("^").removeprefix("=").split(",") if one]

    def named(port: Port) -> bool:
        for name, _, number in wanted:
            same = port.card == name if exact else port.card.startswith(name)
            if same and number in ("", str(port.number)):
                return True
        return False

    return [port for port in found if not wanted or named(port) != without]


class Cards(NamedTuple):
    """What NCCL makes of the ports of a host."""

    active: list[Port]  # those that it uses
    problem: tuple[str, str] | None  # why they are none, not all or unequal, and the way out

    @property
    def layer(self) -> str | None:
        """The link layer of the fastest ports; None without ports."""
        rates = Counter[str]()
        for port in self.active:
            rates[port.layer] += int(port.gbit_s)
        return max(rates, key=lambda layer: (rates[layer], layer == "InfiniBand"), default=None)

    @property
    def kinds(self) -> str:
        """The number of ports of each kind, such as `8 x InfiniBand 400 Gb/s`."""
        count = Counter(f"{_LAYERS.get(port.layer, port.layer)} {port.gbit_s:g} Gb/s" for port in self.active)
        return ", ".join(f"{count[kind]} x {kind}" for kind in sorted(count)) or "none"


def cards(found: Sequence[Port], variables: Mapping[str, str]) -> Cards:
    """Return the ports that NCCL would use with these variables, and the first thing that is wrong with them."""
    choice = variables.get("NCCL_IB_HCA")
    usable = selected(found, choice)
    active = [port for port in usable if port.state == _ACTIVE]
    if variables.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        off = "NCCL_IB_DISABLE is set, so NCCL uses TCP over an interface"
        return Cards([], (off, "unset NCCL_IB_DISABLE") if active else _none(found))
    if not active and choice and any(port.state == _ACTIVE for port in found):
        hint = f"correct or unset NCCL_IB_HCA; active are {_names([one for one in found if one.state == _ACTIVE])}"
        return Cards([], (f"NCCL_IB_HCA={choice} names no active port, so NCCL uses TCP over an interface", hint))
    if not active:
        return Cards([], _none(found))
    layer = Cards(active, None).layer
    of_layer = [port for port in active if port.layer == layer]
    fastest = max(port.gbit_s for port in of_layer)
    best = f"`export NCCL_IB_HCA='={_names([port for port in of_layer if port.gbit_s == fastest])}'`"
    if len({port.layer for port in active}) > 1:
        others = _names([port for port in active if port.layer != layer])
        words = f"{_LAYERS.get(layer or '', layer)} and other cards ({others}) are active, and NCCL may use both"
        return Cards(active, (words, f"{best} selects the fastest network"))
    if len({port.gbit_s for port in active}) > 1:
        slow = _names([port for port in active if port.gbit_s < fastest])
        words = f"ports {slow} are slower than the others ({fastest:g} Gb/s), and NCCL would use them"
        return Cards(active, (words, f"check their cables with `ibstat`; {best} leaves them out"))
    # An Ethernet port without a cable is usual, and says nothing.
    if down := [port for port in usable if port.state != _ACTIVE and port.layer == "InfiniBand" == layer]:
        states = ", ".join(f"{port} {port.state}" for port in down)
        hint = f"check cables and the subnet manager with `ibstat`; if they should not be used, {best}"
        return Cards(active, (f"ports are not active: {states}", hint))
    return Cards(active, None)


def _none(found: Sequence[Port]) -> tuple[str, str]:
    """Say why there is no active port."""
    if found:
        states = ", ".join(f"{port} {port.state}" for port in found)
        hint = "check cables and the subnet manager with `ibstat`, or RoCE's interfaces with `ip link`"
        return f"no port of a network card is active ({states}), so NCCL uses TCP over an interface", hint
    hint = "`ls /sys/class/infiniband`: load the driver of the cards (mlx5_ib); in a container: docker run --device "
    return "has no InfiniBand or RoCE card, so NCCL uses TCP over an interface", f"{hint}/dev/infiniband"


def _names(some: Sequence[Port]) -> str:
    return ",".join(map(str, some))


def compare(hosts: Mapping[str, Cards]) -> dict[str, Check]:
    """Check the cards of hosts with GPUs, given by the names of the hosts.

    NCCL connects two hosts over cards of one link layer, or both over TCP: it hangs where one has cards and the other
    has none (NVIDIA/nccl#234). So a host that differs from most in that fails.
    """
    layers = Counter(one.layer for one in hosts.values())
    most = max(layers, key=lambda layer: (layers[layer], layer is not None), default=None)
    kinds = Counter(one.kinds for one in hosts.values() if one.layer == most and one.problem is None)
    usual = max(kinds, key=lambda kind: (kinds[kind], kind), default="none")
    checks = {}
    for host, one in hosts.items():
        words, hint = one.problem or (f"{one.kinds}", "")
        if one.layer != most:
            theirs = f"most hosts use {_LAYERS.get(most, most)}" if most else "most hosts use TCP"
            message = f"{host}: {words}; {theirs}, and NCCL cannot connect these to it"
            way = f"{hint or 'use the same cards on all hosts'}; or set NCCL_IB_DISABLE=1, and all use TCP"
            checks[host] = failed(NAME, message, way, one.kinds)
        elif one.problem is not None:
            checks[host] = warning(NAME, f"{host}: {words}", hint, one.kinds)
        elif one.kinds != usual:
            message = f"{host} has {one.kinds}, most hosts have {usual}: messages run at the pace of the slowest host"
            checks[host] = warning(NAME, message, f"compare `ibstat` on {host} and another host", one.kinds)
        else:
            checks[host] = ok(NAME, f"{host}: {one.kinds}", one.kinds)
    return checks


def direct(need: Need) -> Check:
    """Check that network cards can read and write the memory of GPUs: by nvidia_peermem, or as a dma-buf."""
    name = "GPUDirect RDMA"
    if not need.gpus or need.nodes < 2:
        return skipped(name, "it is for GPUs on several hosts")
    if not any(port.state == _ACTIVE for port in ports()):
        return skipped(name, "there is no active network card")
    if any((SYS / place).exists() for place in _PEER_MEMORY):
        return ok(name, "nvidia_peermem is loaded", "nvidia_peermem")
    if exports_dma_buf():
        return ok(name, "the driver exports GPU memory as dma-buf", "dma-buf")
    message = "neither nvidia_peermem is loaded nor does the driver export dma-buf: messages pass through host memory"
    hint = "`modprobe nvidia_peermem`, or install the open kernel modules of the driver, which export dma-buf"
    return warning(name, message, hint, "missing")


def fabric_manager(need: Need) -> Check:
    """Check that the fabric manager has connected the GPUs of a host with NVSwitches."""
    name, switches = "fabric manager", len([*DEV.glob("nvidia-nvswitch[0-9]*")])
    start = "`systemctl start nvidia-fabricmanager`, whose version must be that of the driver"
    if not need.gpus:
        return skipped(name, "ranks run on CPUs")
    if not_ready():
        message = "the CUDA driver is not ready (error 802), since the fabric manager of the NVSwitches does not run"
        return failed(name, message, start, "does not run")
    states = Counter(_states())
    wrong = {state for state in states if state in ("Not Started", "In Progress")}
    if wrong:
        value = ", ".join(f"{states[state]} x {state}" for state in sorted(wrong))
        message = f"it has not connected all GPUs ({value}): they do not reach each other over NVLink"
        return warning(name, message, start, value)
    if states["Completed"]:
        return ok(name, f"it has connected {counted(states['Completed'], 'GPU')}", "Completed")
    if not switches:
        return skipped(name, "this host has no NVSwitch")
    # GPUs before Hopper have no such state. Processes of the host are not seen from a container.
    names = {path: _text(path / "comm") for path in PROC.glob("[0-9]*")}
    if names.get(PROC / "1") in ("systemd", "init") and _MANAGER not in names.values():
        message = f"it does not run, but this host has NVSwitches ({switches})"
        return warning(name, message, start, "does not run")
    return ok(name, "the driver is ready", "ready")


def not_ready() -> bool:
    """Return whether the CUDA driver waits for the fabric manager, so that it shows no GPUs."""
    return driver_error() == _NOT_READY


def _states() -> list[str]:
    """Return what nvidia-smi says about each GPU's connection to NVSwitches; nothing if there is none."""
    command = ["nvidia-smi", "--query-gpu=fabric.state", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, stdin=subprocess.DEVNULL)
        return [line.strip() for line in done.stdout.splitlines()]
    return []


def _text(path: Path) -> str:
    with suppress(OSError, UnicodeError):  # the process has ended
        return path.read_text().strip()
    return ""
