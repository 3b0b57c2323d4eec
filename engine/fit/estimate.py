"""The peak memory of a rank by item: the bytes of `Costs` plus the allowances (cost/allowance.py).

An estimate is for one micro-batch whose tokens are all in rings, by default as many as the capacity. With offload, a
rank may get more tokens of one sequence than its capacity: as many as equation 3 and the device allow
(`estimate_fullest`). If ranks differ in memory, each size of memory is estimated, and the result is the rank that is
nearest to its limit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.cost.allowance import Allowance
from engine.cost.sizes import ray_bytes
from engine.cost.states import states
from engine.cost.table import letters
from engine.job import Job
from engine.planner.plan.loads import in_flight, micro_loads, peak_bytes
from engine.planner.plan.step_plan import StepPlan
from engine.planner.ratios import Load, least_offload
from engine.planner.settings import PlanSettings
from engine.units import PPM

ITEMS = ("parameters", "gradients", "optimizer", "activations", "logits", "ring_buffers", "gather_buffers", "other")
_JSON = (
    "working_set",
    "context",
    "fragmentation",
    "device_total",
    "host",
    "host_total",
    "headroom",
    "host_headroom",
    "checkpoint",
    "peak",
    "fits",
    "ray",
    "node",
    "stage",
)


@dataclass(frozen=True)
class Estimate:
    """Peak bytes of each device of a rank, and bytes of the rank on the host."""

    load: Load
    items: dict[str, int]  # by `ITEMS`: tensors, except `other`, which is `context` plus `fragmentation`
    working_set: int  # part of `activations`: of the layer whose backward pass runs
    context: int  # CUDA context and libraries
    fragmentation: int
    device_total: int  # memory of the device
    host: int  # on the host: model states, offloaded activations, `checkpoint` and `ray`
    host_total: int  # host memory of a rank
    headroom: int  # of the device, left free
    host_headroom: int  # of the host, left free
    checkpoint: int = (
        0  # copy of rank 0's states, from which a checkpoint is written; 0 if the host has no memory for it
    )
    ray: int = 0  # the rank's share of what Ray has on its node
    node: str = ""  # the rank's node, if ranks differ in memory
    stage: int = 0  # of the pipeline: the one that needs the most memory

    @property
    def peak(self) -> int:
        """Bytes of all items on the device."""
        return sum(self.items.values())

    @property
    def fits(self) -> bool:
        """Whether both the device and the host have enough memory, with headroom."""
        return self.peak + self.headroom <= self.device_total and self.host + self.host_headroom <= self.host_total

    def as_json(self) -> dict[str, Any]:
        """The object that `estimate-memory --json` prints as `memory`."""
        load = {"tokens": self.load.tokens, "offload": self.load.offload / PPM}
        return self.items | {name: getattr(self, name) for name in _JSON} | load


def estimate(job: Job, load: Load | None = None) -> Estimate:
    """Estimate a micro-batch: by default of as many tokens as the capacity, at the smallest ratio at which it fits."""
    return _nearest(_of(job, rank, load or _full(job.settings, rank)) for rank in _kinds(job.settings))


def estimate_fullest(job: Job) -> Estimate:
    """Estimate the largest micro-batch that a plan may contain.

    With offload it may hold more than `capacity` tokens, if they belong to one sequence.
    """
    return _nearest(_of(job, rank, fullest(job, rank)) for rank in _kinds(job.settings))


def estimate_at(job: Job, ratio: int) -> Estimate:
    """Estimate a micro-batch of full capacity at exactly this offload ratio, in ppm, even if it does not fit."""
    tokens = job.settings.capacities.tolist()
    return _nearest(_of(job, rank, Load(tokens[rank], tokens[rank], ratio)) for rank in _kinds(job.settings))


def estimate_plans(job: Job, plans: Iterable[StepPlan]) -> Estimate:
    """Estimate the micro-batch of these plans (at least one) that is nearest to the memory limit of its rank."""
    settings = job.settings
    costs, memory = settings.costs, settings.cluster.memory
    worst: dict[int, tuple[int, Load]] = {}  # by rank of `_kinds`: peak bytes, and the micro-batch that needs them
    for plan in plans:
        tokens, buffers = micro_loads(plan)
        peaks = peak_bytes(plan, costs)
        waiting = in_flight(plan, costs).tokens.T if plan.mode == "pipeline" else None
        for rank in _kinds(settings):
            own = np.flatnonzero(memory[plan.micro_rank] == memory[rank])
            if len(own):
                at = own[np.argmax(peaks[own])]
                others = None if waiting is None else tuple(waiting[at].tolist())
                load = Load(int(tokens[at]), int(buffers[at]), int(plan.offload[at]), others)
                worst[rank] = max(worst.get(rank, (-1, load)), (int(peaks[at]), load), key=lambda found: found[0])
    return _nearest(_of(job, rank, load) for rank, (_, load) in worst.items())


def copy_bytes(job: Job) -> int:
    """Bytes of the files that rank 0 writes for a checkpoint: its partition, and below stage 3 all weights."""
    values = letters(job.config, job.settings.ranks, stage=0)
    weights = values["b"] * values["P"] if job.config.zero.stage < 3 else 0
    return int(weights + values["w"] * (values["S"] + values["m"]))


def most_on_host(job: Job) -> Estimate:
    """Estimate the micro-batch that puts most bytes of one rank on its host, in any plan of this job."""
    found = (_of(job, rank, fullest(job, rank)) for rank in _kinds(job.settings))
    return max(found, key=lambda one: one.host - one.checkpoint)


def fullest(job: Job, rank: int = 0) -> Load:
    """The largest micro-batch that a plan may give to rank `rank`."""
    settings = job.settings
    if not settings.offload:
        return _full(settings, rank)
    capacity, device = int(settings.capacities[rank]), int(settings.cluster.memory[rank])
    longest = max(capacity, settings.context)  # a micro-batch beyond the capacity is one shard of one sequence
    return least_offload(min(longest, settings.largest_shard(capacity, device)), capacity, device, settings)


def _full(settings: PlanSettings, rank: int) -> Load:
    """A micro-batch of rank `rank` with as many tokens as its capacity, at the smallest ratio at which it fits."""
    capacity = int(settings.capacities[rank])
    return least_offload(capacity, capacity, int(settings.cluster.memory[rank]), settings)


def _nearest(found: Iterable[Estimate]) -> Estimate:
    """The estimate with the largest ratio of peak to device memory; estimates that do not fit come first."""
    return max(found, key=lambda one: (not one.fits, one.peak / one.device_total))


def _kinds(settings: PlanSettings) -> list[int]:
    """One rank for each size of device memory in the cluster: ranks of equal memory have equal capacity."""
    first: list[int] = np.unique(settings.cluster.memory, return_index=True)[1].tolist()
    return first


def _of(job: Job, rank: int, load: Load) -> Estimate:
    """Estimate the micro-batch `load` on rank `rank`."""
    config, settings = job.config, job.settings
    tokens, buffers = np.int64(load.tokens), np.int64(load.buffers)
    each = settings.costs.stages
    waiting = [None] * len(each) if load.waiting is None else [[np.int64(others)] for others in load.waiting]
    peaks = [
        int(one.peak_bytes(tokens, buffers, load.offload, others)) for one, others in zip(each, waiting, strict=True)
    ]
    peak = max(peaks)
    stage = peaks.index(peak)
    allowance, held = Allowance.of(config, job.cluster), states(config, settings.ranks, stage)
    costs = settings.costs.stages[stage]
    saved = costs.token_bytes * int(costs.resident(tokens, load.offload))
    # In a pipeline `token_bytes` counts all micro-batches in flight; rounded up, as in `Costs.fullest`.
    if load.waiting is not None:
        saved = -(
            -costs.token_bytes * (int(costs.resident(tokens, load.offload)) + load.waiting[stage]) // costs.in_flight
        )
    working, layer = int(costs.working(load.tokens)), int(costs.instants[0].of(load.tokens))
    rings = costs.ring_bytes * load.buffers
    items = {
        "parameters": held.parameters,
        # The rest of the peak, if that is the end of the step: copies for reduction and update.
        "gradients": held.gradients + peak - costs.fixed_bytes - saved - working - rings,
        "optimizer": held.optimizer,
        "activations": saved + layer,
        "logits": working - layer,
        "ring_buffers": rings,
        "gather_buffers": held.gather_buffers,
    }
    fragmentation = allowance.fragmentation(sum(items.values()))
    host, host_total = costs.host_fixed_bytes, config.cluster.host_memory
    host += int(settings.costs.host_bytes(tokens, load.offload))  # of the stage that offloads the most
    copy = copy_bytes(job)
    copy = copy if host + copy + allowance.free(host_total) <= host_total else 0
    total = config.cluster.device_memory
    if config.cluster.hostfile is not None:  # a node may state its own memory
        total = int(job.cluster.hdp(config.parallel).memory[rank])
    return Estimate(
        load=load,
        items=items | {"other": allowance.context + fragmentation},
        working_set=layer,
        context=allowance.context,
        fragmentation=fragmentation,
        device_total=total,
        host=host + copy,
        host_total=host_total,
        headroom=allowance.free(total),
        host_headroom=allowance.free(host_total),
        checkpoint=copy,
        ray=ray_bytes(config),
        node=settings.host(rank) if len(_kinds(settings)) > 1 else "",
        stage=stage,
    )
