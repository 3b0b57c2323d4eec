"""What a rank's memory holds at its fullest, by item: the bytes of `Costs`, and the allowances beside them.

The fullest micro-batch is `capacity` tokens, all of them in rings. Where activations may wait on the host it is as much
of one sequence as equation 3 and the device let a rank hold, at the least ratio that this takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.cluster.cluster import Cluster
from engine.config.schema import Config
from engine.cost.allowance import Allowance
from engine.cost.model import PPM, Costs
from engine.cost.states import states
from engine.planner import memory as room
from engine.planner.loads import micro_loads
from engine.planner.memory import Load
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
        told = ("working_set", "context", "fragmentation", "device_total", "host", "host_total", "peak", "fits")
        load = {"tokens": self.load.tokens, "offload": self.load.offload / PPM}
        return self.items | {name: getattr(self, name) for name in told} | load


def estimate(config: Config, settings: PlanSettings, load: Load | None = None) -> Estimate:
    """Return what a micro-batch, by default the fullest, makes a device of the rank with the least memory hold."""
    load = load or fullest(config, settings)
    allowance, held, costs = Allowance.of(config), states(config, settings.ranks), settings.costs
    saved = costs.token_bytes * int(costs.resident(np.int64(load.tokens), load.offload))
    working, layer = int(costs.working(load.tokens)), int(costs.moments[0].of(load.tokens))
    most = int(costs.fullest(np.int64(load.tokens), load.offload))
    items = {
        "parameters": held.parameters,
        "gradients": held.gradients + most - saved - working,
        "optimizer": held.optimizer,
        "activations": saved + layer,
        "logits": working - layer,
        "ring_buffers": costs.ring_bytes * load.buffers,
        "gather_buffers": held.gather_buffers,
    }
    fragmentation = allowance.fragmentation(sum(items.values()))
    return Estimate(
        load=load,
        items=items | {"other": allowance.context + fragmentation},
        working_set=layer,
        context=allowance.context,
        fragmentation=fragmentation,
        device_total=_device(config),
        host=costs.host_fixed_bytes + int(costs.host_bytes(np.int64(load.tokens), load.offload)),
        host_total=config.cluster.host_memory,
    )


def fullest(config: Config, settings: PlanSettings) -> Load:
    """Return the fullest micro-batch of the rank with the least memory."""
    rank = int(np.argmin(settings.cluster.memory))
    capacity, device = int(settings.capacities[rank]), int(settings.cluster.memory[rank])
    longest = max(capacity, config.context)  # nothing beyond the capacity but a part of one sequence
    tokens = min(longest, room.most(capacity, device, settings)) if settings.offload else capacity
    return room.least_offload(tokens, capacity, device, settings)


def of_plans(plans: Iterable[StepPlan], costs: Costs) -> Load:
    """Return the micro-batch of these plans (one at least) that needs the most of a device."""
    return max((_worst(plan, costs) for plan in plans), key=lambda load: _peak(load, costs))


def _worst(plan: StepPlan, costs: Costs) -> Load:
    tokens, buffers = micro_loads(plan)
    worst = int(np.argmax(costs.peak_bytes(tokens, buffers, plan.offload)))
    return Load(int(tokens[worst]), int(buffers[worst]), int(plan.offload[worst]))


def _peak(load: Load, costs: Costs) -> int:
    return int(costs.peak_bytes(np.int64(load.tokens), np.int64(load.buffers), load.offload))


def _device(config: Config) -> int:
    """Return the bytes of the device with the least memory, allowances included."""
    if config.cluster.hostfile is None:
        return config.cluster.device_memory
    return int(Cluster.of(config.cluster).memory.min())
