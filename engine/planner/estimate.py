"""What a rank's memory holds at its fullest, by item: the bytes of `Costs`, and the allowances beside them.

The fullest micro-batch is `capacity` tokens, all of them in rings. Where activations may wait on the host it is as much
of one sequence as equation 3 and the device let a rank hold, at the least ratio that this takes. Where ranks differ in
memory each kind is held against its own, and the one that is nearest to it, or furthest over it, is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.cluster.cluster import Cluster
from engine.config.schema import Config
from engine.cost.allowance import Allowance
from engine.cost.model import PPM, Costs
from engine.cost.states import states
from engine.planner.loads import micro_loads
from engine.planner.memory import Load, least_offload, most
from engine.planner.plan import StepPlan
from engine.planner.settings import PlanSettings

ITEMS = ("parameters", "gradients", "optimizer", "activations", "logits", "ring_buffers", "gather_buffers", "other")


@dataclass(frozen=True)
class Estimate:
    """A device's bytes: all `ITEMS` but `other` are tensors, `other` is the runtime's context and the fragmentation."""

    load: Load
    items: dict[str, int]
    working_set: int  # of the activations: those of the layer whose backward pass is computed
    context: int
    fragmentation: int
    device_total: int
    host: int
    host_total: int
    node: str = ""  # of such a rank, where ranks differ in memory

    @property
    def peak(self) -> int:
        """Return the bytes of all items."""
        return sum(self.items.values())

    @property
    def fits(self) -> bool:
        """Return whether device and host have room for it."""
        return self.peak <= self.device_total and self.host <= self.host_total

    def as_json(self) -> dict[str, Any]:
        """Return it as `estimate-memory --json` has it."""
        told = ("working_set", "context", "fragmentation", "device_total", "host", "host_total", "peak", "fits", "node")
        load = {"tokens": self.load.tokens, "offload": self.load.offload / PPM}
        return self.items | {name: getattr(self, name) for name in told} | load


def estimate(config: Config, settings: PlanSettings, load: Load | None = None) -> Estimate:
    """Return what a micro-batch, by default a rank's fullest, makes a device hold."""
    return _nearest(_of(config, settings, rank, load or fullest(config, settings, rank)) for rank in _kinds(settings))


def at_ratio(config: Config, settings: PlanSettings, ratio: int) -> Estimate:
    """Return what a rank's capacity makes a device hold with just so much of it on the host, ppm, enough or not."""
    tokens = settings.capacities.tolist()
    return _nearest(_of(config, settings, rank, Load(tokens[rank], tokens[rank], ratio)) for rank in _kinds(settings))


def most_on_host(config: Config, settings: PlanSettings) -> int:
    """Return the most bytes of a rank that may wait on its host."""
    return max(_of(config, settings, rank, fullest(config, settings, rank)).host for rank in _kinds(settings))


def of_plans(config: Config, settings: PlanSettings, plans: Iterable[StepPlan]) -> Estimate:
    """Return what the fullest micro-batch of these plans (one at least) makes a device hold."""
    worst: dict[int, Load] = {}
    for plan in plans:
        for rank, load in _worst(plan, settings):
            worst[rank] = max(worst.get(rank, load), load, key=lambda one: _peak(one, settings.costs))
    return _nearest(_of(config, settings, rank, load) for rank, load in worst.items())


def _nearest(found: Iterable[Estimate]) -> Estimate:
    """Return the one that is nearest to its limit, or furthest over it."""
    return max(found, key=lambda one: (not one.fits, one.peak / one.device_total))


def _kinds(settings: PlanSettings) -> list[int]:
    """Return a rank of each size of memory: its capacity follows from that."""
    first: list[int] = np.unique(settings.cluster.memory, return_index=True)[1].tolist()
    return first


def _of(config: Config, settings: PlanSettings, rank: int, load: Load) -> Estimate:
    allowance, held, costs = Allowance.of(config), states(config, settings.ranks), settings.costs
    saved = costs.token_bytes * int(costs.resident(np.int64(load.tokens), load.offload))
    working, layer = int(costs.working(load.tokens)), int(costs.moments[0].of(load.tokens))
    rings = costs.ring_bytes * load.buffers
    items = {
        "parameters": held.parameters,
        "gradients": held.gradients + _peak(load, costs) - costs.fixed_bytes - saved - working - rings,
        "optimizer": held.optimizer,
        "activations": saved + layer,
        "logits": working - layer,
        "ring_buffers": rings,
        "gather_buffers": held.gather_buffers,
    }
    fragmentation = allowance.fragmentation(sum(items.values()))
    return Estimate(
        load=load,
        items=items | {"other": allowance.context + fragmentation},
        working_set=layer,
        context=allowance.context,
        fragmentation=fragmentation,
        device_total=_device(config, rank),
        host=costs.host_fixed_bytes + int(costs.host_bytes(np.int64(load.tokens), load.offload)),
        host_total=config.cluster.host_memory,
        node=settings.host(rank) if len(_kinds(settings)) > 1 else "",
    )


def fullest(config: Config, settings: PlanSettings, rank: int = 0) -> Load:
    """Return the fullest micro-batch of a rank."""
    capacity, device = int(settings.capacities[rank]), int(settings.cluster.memory[rank])
    longest = max(capacity, config.context)  # nothing beyond the capacity but a part of one sequence
    tokens = min(longest, most(capacity, device, settings)) if settings.offload else capacity
    return least_offload(tokens, capacity, device, settings)


def _worst(plan: StepPlan, settings: PlanSettings) -> Iterator[tuple[int, Load]]:
    """Yield a rank of each size of memory, and the micro-batch that needs the most of such a device, if it has any."""
    tokens, buffers = micro_loads(plan)
    first = np.isin(np.arange(plan.micro_batches), plan.micro_start)
    peaks, memory = settings.costs.peak_bytes(tokens, buffers, plan.offload, first), settings.cluster.memory
    for rank in _kinds(settings):
        own = np.flatnonzero(memory[plan.micro_rank] == memory[rank])
        if len(own):
            worst = own[np.argmax(peaks[own])]
            yield rank, Load(int(tokens[worst]), int(buffers[worst]), int(plan.offload[worst]), bool(first[worst]))


def _peak(load: Load, costs: Costs) -> int:
    return int(costs.peak_bytes(np.int64(load.tokens), np.int64(load.buffers), load.offload, load.first))


def _device(config: Config, rank: int) -> int:
    """Return the bytes of a rank's device, allowances included."""
    if config.cluster.hostfile is None:
        return config.cluster.device_memory
    return int(Cluster.of(config.cluster, config.parallel).memory[rank])
