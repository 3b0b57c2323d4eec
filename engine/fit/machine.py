"""Limits a config to the memory of this machine, where its ranks run on it."""

from __future__ import annotations

from engine.cluster.available_memory import total_bytes
from engine.cluster.gpus import least_gpu_memory
from engine.cluster.hosts import is_local
from engine.config.devices import uses_gpus
from engine.config.units import counted, format_apart
from engine.job import Job

# Of the host's memory, what ranks may use; the rest is for the system, page caches and the ranks' own processes. The
# same share as in recipes/cluster. Total memory, not available memory: plans must not differ between restarts.
_SHARE = 3, 4


def on_this_machine(job: Job) -> tuple[Job, list[str]]:
    """Return the job with at most the memory of this machine, and a line for each value that had to be lowered.

    A rank gets an equal part of three quarters of the host's memory, and the memory of the smallest GPU. Ranks of
    `cluster=local` are processes: their own memory and that for offload together are this part. Memory that cannot be
    read limits nothing, and a job whose ranks all run on other hosts is unchanged. A hostfile's `memory=` is checked by
    `gpu_problem`.
    """
    config = job.config
    ranks = sum(node.devices for node in job.cluster.nodes if is_local(node.host))
    host = total_bytes()
    if not ranks:
        return job, []
    share = None if host is None else host * _SHARE[0] // _SHARE[1] // ranks
    of_host = f"each rank's share of three quarters of this machine's memory ({counted(ranks, 'rank')})"
    of_gpu = "the memory of this machine's smallest GPU"
    # Plans must be possible on every rank, so the smallest GPU limits all.
    limits = {"device_memory": (least_gpu_memory(), of_gpu), "host_memory": (share, of_host)}
    if not uses_gpus(config):
        # Both are parts of one memory, in the proportion of the recipe.
        device, offload = config.cluster.device_memory, config.cluster.host_memory
        of_device = None if share is None else share * device // (device + offload)
        rest = None if share is None or of_device is None else share - of_device
        limits = {"device_memory": (of_device, f"part of {of_host}"), "host_memory": (rest, f"part of {of_host}")}
    # Only lowered: a user may set less than the machine has, for example to plan for a smaller one.
    lower, lines = {}, []
    for key, (limit, what) in limits.items():
        asked = getattr(config.cluster, key)
        if limit is not None and limit < asked:
            has, recipe = format_apart(limit, asked)
            lines.append(f"cluster.{key}: planning with {has}, {what}, instead of {recipe}")
            lower[key] = limit
    if not lower:
        return job, []
    limited = config.model_copy(update={"cluster": config.cluster.model_copy(update=lower)})
    return job.with_config(limited), lines
