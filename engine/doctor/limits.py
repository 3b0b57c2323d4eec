"""Checks what the operating system allows: open files, locked memory, processes, host memory and shared memory.

Also on every host: which processors ranks on GPUs would run on, and what connects GPUs (interconnect.py).
"""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

from engine.cluster.available_memory import available_bytes
from engine.cluster.gpus import gpus
from engine.cluster.numa import listed, node_of, of_ranks, spans_nodes
from engine.config.units import counted, format_bytes
from engine.doctor.check import Check, failed, ok, skipped, warning
from engine.doctor.interconnect import direct, fabric_manager
from engine.launch.checks.ready import SOCKETS, Need, most_threads

SHARED = Path("/dev/shm")
_FILES = 512  # that a rank or a launcher has open besides connections: libraries, documents, logs
_FILES_PER_NODE = 3  # of the launcher: pipes to the agent, or to ssh
_THREADS = 128  # of a rank with its loaders and compilers
_OTHER_THREADS = 256
_RANK_BYTES = 1 << 30  # host memory of a rank besides tensors: the libraries of torch and CUDA
# NCCL puts buffers between GPUs of a node into shared memory. Its documentation advises 1 GiB for containers, whose
# default is 64 MiB. Without GPUs there are only the semaphores of processes.
_SHARED = {True: 1 << 30, False: 1 << 24}
_CONTAINER = "in a container: docker run --shm-size=1g, or an emptyDir with medium: Memory at /dev/shm"


def open_files(need: Need) -> Check:
    """Check the limit of open files and sockets of a process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = _FILES + max(_FILES_PER_NODE * need.nodes, SOCKETS[need.gpus] * need.world)
    value = f"{_number(soft)} files"
    if _below(soft, least):
        hint = f"`ulimit -n {least}` before the start"
        if _below(hard, least):
            hint = f"let an administrator raise nofile to {least} in /etc/security/limits.conf, or in the job's limits"
        message = f"a process may open {value}, but {counted(need.world, 'rank')} need about {least:,} each"
        return failed("open files", message, hint, value)
    return ok("open files", f"a process may open {value}", value)


def locked_memory(need: Need) -> Check:
    """Check the limit of memory that cannot be swapped, which InfiniBand needs. It does not apply to CUDA."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    value = "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)
    if need.gpus and need.nodes > 1 and soft != resource.RLIM_INFINITY:
        message = f"a process may lock {value}: NCCL cannot register its buffers with InfiniBand cards"
        hint = "set memlock to unlimited in /etc/security/limits.conf; in a container: docker run --ulimit memlock=-1"
        return warning("locked memory", message, hint, value)
    return ok("locked memory", f"a process may lock {value}", value)


def processes(need: Need) -> Check:
    """Check how many threads may run: the limit of the user, which root does not have, and that of the container."""
    least, most = _OTHER_THREADS + _THREADS * need.ranks, most_threads()
    most = resource.RLIM_INFINITY if most is None else most
    value = f"{_number(most)} threads"
    if _below(most, least):
        message = f"{value} may run, but {counted(need.ranks, 'rank')} here need about {least:,}"
        hint = f"`ulimit -u {4 * least}`, or raise pids.max of the container (docker run --pids-limit)"
        return failed("processes", message, hint, value)
    return ok("processes", f"{value} may run", value)


def memory(need: Need) -> Check:
    """Check that host memory suffices for processes that keep no tensors on the host."""
    free = available_bytes()
    if free is None:
        return warning("memory", "the system does not say how much is available", "check it with `free -g`")
    least, value = need.ranks * _RANK_BYTES, f"{format_bytes(free)} available"
    if free < least:
        message = f"{value}, but {counted(need.ranks, 'rank')} here need {format_bytes(least)} without any tensors"
        return failed("memory", message, "stop other processes, or use fewer ranks on this machine", value)
    return ok("memory", value, value)


def shared_memory(need: Need) -> Check:
    """Check the space of /dev/shm."""
    name, least = "shared memory", max(_SHARED[need.gpus and need.ranks > 1], need.ray)
    try:
        free = shutil.disk_usage(SHARED).free
    except OSError as error:
        return failed(name, f"{SHARED}: {error.strerror}", f"mount it: mount -t tmpfs tmpfs {SHARED}", "missing")
    value = f"{format_bytes(free)} free"
    if free < least:
        who = "Ray (data.ray.memory) needs" if least == need.ray else f"{counted(need.ranks, 'rank')} here need"
        message = f"{SHARED} has {value}, but {who} {format_bytes(least)}"
        return failed(name, message, f"remove old files in {SHARED}, or make it larger; {_CONTAINER}", value)
    return ok(name, f"{SHARED} has {value}", value)


def processors(need: Need) -> Check:
    """Show which processors the agent would bind the ranks on GPUs to, and why not if it would not."""
    name = "processors"
    if not need.gpus:
        return skipped(name, "ranks run on CPUs")
    places = [gpu.pci for gpu in gpus()[: need.ranks]]
    if not places:
        return skipped(name, "CUDA finds no GPU here")
    nodes, allowed = [node_of(place) for place in places], os.sched_getaffinity(0)
    bound, value = of_ranks(places, allowed), counted(len({*nodes} - {None}), "NUMA node")
    if not spans_nodes(allowed):
        return ok(name, "those that may be used are on one NUMA node, so no rank is bound", value)
    if None in nodes:
        unknown = listed(number for number, node in enumerate(nodes) if node is None)
        message = f"the system does not say on which NUMA node GPUs {unknown} are, so their ranks are not bound"
        hint = (
            "let this virtual machine know the NUMA nodes: `cat /sys/bus/pci/devices/*/numa_node` shows -1 without them"
        )
        return warning(name, message, hint, value)
    if free := [number for number, own in enumerate(bound) if own == allowed]:
        message = f"only {listed(allowed)} may be used, too few of them near GPUs {listed(free)}: ranks are not bound"
        hint = "give the job processors of all sockets, with Slurm's --exclusive or the cpuset of the container"
        return warning(name, message, hint, value)
    return ok(name, "; ".join(f"GPU {number}: {listed(own)}" for number, own in enumerate(bound)), value)


def _below(limit: int, least: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < least


def _number(limit: int) -> str:
    return "any number of" if limit == resource.RLIM_INFINITY else f"{limit:,}"


CHECKS: dict[str, Callable[[Need], Check]] = {
    "open files": open_files,
    "locked memory": locked_memory,
    "processes": processes,
    "memory": memory,
    "shared memory": shared_memory,
    "processors": processors,
    "GPUDirect RDMA": direct,
    "fabric manager": fabric_manager,
}
