"""Refuses configs that cannot be launched. Looks at the config and this machine only; reads and writes no files."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

from engine.cluster.cluster import Cluster
from engine.cluster.gpus import least_gpu_memory, pytorch_without_cuda, unusable, visible_gpus
from engine.cluster.hostfile import ONCE
from engine.cluster.hosts import is_local, is_loopback
from engine.cluster.nccl import ONE_GPU, shares_gpu
from engine.config.devices import uses_gpus
from engine.config.mesh_checks import nearest_mesh
from engine.config.schema import Config
from engine.config.units import counted, format_apart
from engine.cost.sizes import parameters
from engine.data.workers import cores
from engine.errors import ConfigError, Problem
from engine.job import Job
from engine.launch.checks.interface import addresses_of

_LOOKUPS = 64  # of host names at once
_MOST_SHARED = 10_000_000  # parameters of a model whose ranks may share a GPU: for tests, model=tiny has 26,000


def check_launch(job: Job, launcher: str | None) -> None:
    """Raise ConfigError for a job that cannot be launched on any machine; a dry run rejects it, too.

    `launcher` is `local`, `hostfile`, or None if the user chose none.
    """
    config, cluster = job.config, job.cluster
    if config.dtype == "fp64":
        message = "fp64 is for tests only: DeepSpeed keeps its master weights in fp32"
        raise ConfigError(message, key="dtype=fp64", hint="use dtype=fp32 or dtype=bf16")
    if config.model.window is not None and any(config.model.windowed):
        message = "layers with an attention window can be planned and estimated, but not trained yet"
        raise ConfigError(message, key="model.window", hint="set model.window=null")
    if launcher == "hostfile" and config.cluster.hostfile is None:
        raise ConfigError("needs a hostfile", key="--launcher hostfile", hint="add --hostfile FILE")
    if all(is_local(node.host) for node in cluster.nodes):
        return
    if launcher == "local":
        message = "starts ranks on this machine only, but the hostfile names other hosts"
        raise ConfigError(message, key="--launcher local", hint="use --launcher hostfile")
    loopback = [node.host for node in cluster.nodes if is_loopback(node.address)]
    if config.cluster.hostfile is not None and len(cluster.nodes) > 1 and loopback:
        message = f"{loopback[0]} is listed with other hosts, but every host resolves that name to itself"
        hint = "replace it with a name by which the other hosts reach this machine"
        raise ConfigError(message, key="cluster.hostfile", hint=hint)


def not_launchable(job: Job, joins: bool = False) -> list[Problem]:
    """Return the problems that stop a launch but not a dry run: nodes without a hostfile.

    With `joins`, nodes need no hostfile: a scheduler has started a process on each.
    """
    problems, nodes = [], len(job.cluster.nodes)
    if job.config.cluster.hostfile is None and nodes > 1 and not joins:
        key = f"cluster.nodes={nodes}"
        hint = "add --hostfile FILE, or --launcher slurm or k8s; `plan` and `train --dry-run` need no hosts"
        problems.append(Problem("several nodes need a hostfile", key, hint))
    return problems


def same_host(cluster: Cluster, resolve: bool) -> Problem | None:
    """Return the problem if two nodes are one host: ranks of both would use the same GPUs and memory.

    Names of this machine are known; with `resolve`, those that have an address in common are one host too.
    """
    here = {address for _, name in socket.if_nameindex() for address in addresses_of(name)}

    def resolved(host: str) -> set[str]:
        with suppress(OSError, UnicodeError):  # the name is not known, which ssh will report
            return {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        return set()

    seen = dict[str, str]()  # hosts by address; those of this machine by an empty text
    with ThreadPoolExecutor(_LOOKUPS) as pool:
        names = [node.address for node in cluster.nodes]
        found = pool.map(resolved, names) if resolve else ({name} for name in names)
        for node, addresses in zip(cluster.nodes, found, strict=True):
            local = is_local(node.address) or not here.isdisjoint(addresses)
            for address in {""} if local else addresses:
                other = seen.setdefault(address, node.host)
                if other != node.host:
                    why = "this machine" if local else f"the host with the address {address}"
                    return Problem(f"{other} and {node.host} are both {why}", "cluster.hostfile", ONCE)
    return None


def gpu_problem(job: Job) -> Problem | None:
    """Return the problem if this machine's GPUs are fewer or smaller than the config says, or PyTorch cannot use them.

    Each agent counts those of its own host. Without this check ranks would silently train on CPUs, or share a GPU, and
    be slow: that is only for tests, with BYTESCALE_ONE_GPU=1. A smaller GPU is a problem only if the hostfile names its
    memory; else `on_this_machine` plans with the memory that it has.
    """
    config = job.config
    if not uses_gpus(config):
        return None
    if shares_gpu() and (problem := _shared_gpu_problem(job)):
        return problem
    here = [node for node in job.cluster.nodes if is_local(node.host)]
    if not here:
        return None
    ranks, gpus = max(node.devices for node in here), visible_gpus()
    if shares_gpu():
        ranks = 1
    if ranks <= gpus:
        stated, has = max(node.memory or 0 for node in here), least_gpu_memory()
        if has is None or stated <= has:
            return pytorch_problem(config)
        said, found = format_apart(stated, has)
        message = f"says memory={said} for this machine, but CUDA finds a GPU with {found}"
        return Problem(message, "cluster.hostfile", f"remove memory= for this machine in {config.cluster.hostfile}")
    if not gpus:
        return no_gpus(config)
    message = f"{counted(ranks, 'rank')} need one GPU each, but CUDA finds {gpus} on {socket.gethostname()}{_seen()}"
    if config.cluster.hostfile is None:
        fewer = config.cluster.model_copy(update={"ranks_per_node": gpus})
        mesh = nearest_mesh(config.model_copy(update={"cluster": fewer}))
        parallel = config.parallel
        hint = f"set cluster.ranks_per_node={gpus}"
        if mesh and mesh != (parallel.tp, parallel.pp):
            hint += " parallel.tp={} parallel.pp={}".format(*mesh)
        return Problem(message, f"cluster.ranks_per_node={ranks}", hint)
    return Problem(message, "cluster.hostfile", f"set slots={gpus} for this machine in {config.cluster.hostfile}")


def _shared_gpu_problem(job: Job) -> Problem | None:
    """The problem of a job that is no test, if all ranks are to share a GPU."""
    key, size = f"{ONE_GPU}=1", parameters(job.config.model)
    hint = f"unset {ONE_GPU}"
    if len(job.cluster.nodes) > 1:
        return Problem("lets the ranks of one host share a GPU, and this job has several hosts", key, hint)
    if size > _MOST_SHARED:
        message = f"lets ranks share a GPU in tests of models of up to {_MOST_SHARED:,} parameters, not of {size:,}"
        return Problem(message, key, hint)
    return None


def no_gpus(config: Config) -> Problem:
    """The problem of a config for GPUs on a machine without any."""
    message = f"trains on GPUs, but CUDA finds none on this machine{_seen()}"
    hint = "use a machine with GPUs; recipe=quickstart needs none, and `bytescale train --dry-run` only plans"
    return Problem(message, f"cluster={config.cluster.name}", hint)


def pytorch_problem(config: Config) -> Problem | None:
    """Return the problem if PyTorch was built without CUDA, else None. Whether it fits the driver, ranks find out."""
    version = pytorch_without_cuda()
    if version is None:
        return None
    return replace(unusable(version, "it was built without CUDA"), key=f"cluster={config.cluster.name}")


def _seen() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible or repr(visible)}"


def shared_cores(job: Job) -> str | None:
    """Return a line if several CPU ranks share each core of this machine; None if they do not."""
    ranks, here = sum(node.devices for node in job.cluster.nodes if is_local(node.host)), cores()
    if uses_gpus(job.config) or ranks <= 2 * here:
        return None
    return f"{ranks} ranks share {counted(here, 'core')} of this machine and take turns; --nproc {here} is not slower"


def idle_gpus(job: Job) -> str | None:
    """Return a line if ranks run on CPUs although this machine has GPUs; None if not."""
    if uses_gpus(job.config) or not any(is_local(node.host) for node in job.cluster.nodes):
        return None
    gpus = visible_gpus()
    if not gpus:
        return None
    idle = f"{counted(gpus, 'GPU')} of this machine will not be used"
    return (
        f"cluster=local trains on CPUs: {idle} (docs/gpu.md; for example cluster=h200x8 cluster.ranks_per_node={gpus})"
    )
