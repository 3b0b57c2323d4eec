"""Check that this machine has enough host memory for its ranks, before any of them starts."""

from __future__ import annotations

from collections.abc import Iterable

from engine.cluster.available_memory import available_bytes
from engine.cluster.cluster import Cluster
from engine.cluster.hosts import is_local
from engine.config.units import counted, format_apart, format_bytes
from engine.errors import Problem
from engine.fit.estimate import copy_bytes, most_on_host
from engine.job import Job
from engine.planner.plan.loads import micro_tokens
from engine.planner.plan.step_plan import StepPlan


def host_problem(plans: Iterable[StepPlan], job: Job) -> Problem | None:
    """A problem if model states and the plans' offloaded activations need more memory than this host has available now.

    None if they do not, or if the available memory is unknown. Other hosts are not checked: a rank there that gets too
    little memory stops before its first step.
    """
    config, costs, cluster = job.config, job.costs, job.cluster
    ranks, available = _ranks_here(cluster), available_bytes()
    if available is None or not ranks:
        return None
    a_rank = costs.host_fixed_bytes
    a_rank += max((int(costs.host_bytes(micro_tokens(plan), plan.offload).max()) for plan in plans), default=0)
    if a_rank * ranks <= available:
        return None
    needs, has = format_apart(a_rank * ranks, available)
    message = (
        f"each rank would keep {format_bytes(a_rank)} on the host, {needs} for {counted(ranks, 'rank')}, "
        f"but only {has} of this machine's memory is available"
    )
    if costs.host_fixed_bytes * ranks <= available:
        return Problem(message, "offload.ratio", "set a smaller offload.ratio, capacity or context")
    on_host = {"zero.weights_on_host": config.zero.weights_on_host, "optimizer.on_host": config.optimizer.on_host}
    keys = [key for key, chosen in on_host.items() if chosen]
    back = " or ".join(f"{key}=false" for key in keys)
    if len(cluster.nodes) > 1:
        return Problem(message, "cluster.ranks_per_node", f"use more machines, or set {back}")
    hint = f"set {back}, or stop other processes that use memory here, or shard the states over more machines: "
    return Problem(message, keys[0], f"{hint}--hostfile FILE")


def tight(job: Job) -> str | None:
    """A warning if some step may need more memory on this host than is available now; else None."""
    found, ranks, available = most_on_host(job), _ranks_here(job.cluster), available_bytes()
    if available is None or not ranks:
        return None
    most = found.host if found.checkpoint <= copy_limit(available, ranks) else found.host - found.checkpoint
    if most * ranks <= available:
        return None
    return (
        f"a step may put {format_bytes(most)} per rank on the host, but only {format_bytes(available)} of this "
        f"machine's memory is available for {counted(ranks, 'rank')}; lower cluster.host_memory to plan with less"
    )


def waits_for_checkpoints(job: Job) -> str | None:
    """A line if the host has too little memory for copies of the states, so that training waits for checkpoints."""
    ranks, available = _ranks_here(job.cluster), available_bytes()
    copy, host = copy_bytes(job), job.config.cluster.host_memory
    if not most_on_host(job).checkpoint:
        short = f"cluster.host_memory={format_bytes(host)} is too small for"
    elif available is not None and ranks and copy > copy_limit(available, ranks):
        short = f"half of the {format_bytes(available)} that are free on this machine is too small for"
    else:
        return None
    return (
        f"training will wait while a checkpoint is written: {short} a copy of the states, {format_bytes(copy)} per rank"
    )


def copy_limit(available: int, ranks: int) -> int:
    """Most bytes that one of `ranks` ranks of a host copies, if `available` bytes are left on it.

    A half stays for what else grows: activations, documents, other processes.
    """
    return available // 2 // ranks


def _ranks_here(cluster: Cluster) -> int:
    """Number of ranks on this machine."""
    return sum(node.devices for node in cluster.nodes if is_local(node.host))
