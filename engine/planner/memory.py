"""What a micro-batch may hold when a part of it waits on the host, and how large that part is.

Equation 3 of ByteScale bounds the activations that stay: ((2 + (1 - r)(l - 2)) / l) n <= C tokens. Beside them stand
the working set of all n tokens and the ring's buffers, which never leave the device (rule 2 of `verify`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from engine.cost import room
from engine.cost.model import PPM
from engine.cost.room import least, least_ratio
from engine.planner.bound import Floats
from engine.planner.loads import micro_loads
from engine.planner.plan import Ints, StepPlan
from engine.planner.settings import PlanSettings


@dataclass(frozen=True)
class Load:
    """A micro-batch: its tokens, those of its rings' largest shards, and how much of it waits on the host, ppm."""

    tokens: int
    buffers: int
    offload: int
    first: bool = False  # of its rank in the step


@lru_cache(maxsize=8)
def most_tokens(settings: PlanSettings) -> Ints:
    """Return the tokens of a ring that a rank holds if as much as allowed is offloaded, [P]; at least its capacity."""
    classes, index = np.unique(np.stack([settings.capacities, settings.cluster.memory]), axis=1, return_inverse=True)
    found = [most(int(capacity), int(memory), settings) for capacity, memory in classes.T.tolist()]
    return np.array(found, dtype=np.int64)[index.ravel()]


def gain(lengths: Ints, settings: PlanSettings) -> Floats:
    """Return how many times its capacity a rank holds of each sequence while copies hide behind computing, [S].

    Equation 3: a token's share r of the copies takes no longer than its forward pass, which grows with the length.
    """
    rates, layers = settings.costs.rates, settings.costs.layers
    forward = rates.token_f + rates.pair_f * (lengths + 1) / 2
    ratio = np.minimum(settings.offload / PPM, forward / rates.copy)
    return layers / (2 + (1 - ratio) * (layers - 2))


def most(capacity: int, memory: int, settings: PlanSettings) -> int:
    """Return `most_tokens` of a rank of this capacity and memory."""
    return max(capacity, room.most_tokens(settings.costs, settings.room(memory), capacity))


def equation_3(lengths: Ints, settings: PlanSettings) -> tuple[Ints, Ints]:
    """Return each sequence's degree and offload ratio, ppm, as ByteScale's equation 3 chooses them, [S] each.

    The largest ratio whose copies hide behind a layer's forward pass, if it frees at least one rank; else r = 0. Where
    that empties the interval it is r = 0 too (our reading). The degree is raised where the working set of so many
    tokens, which the equation leaves out, would not fit the device or the host.
    """
    layers, capacity = settings.costs.layers, settings.least_capacity
    plain = -(-lengths // capacity)
    if not settings.offload or layers <= 2:
        return plain, np.zeros(len(lengths), dtype=np.int64)
    rates = settings.costs.rates
    forward = rates.token_f + rates.pair_f * (lengths + 1) / 2
    most = np.minimum(settings.offload, (PPM * np.minimum(1.0, forward / rates.copy)).astype(np.int64))
    least = np.minimum(PPM, layers * capacity * PPM // ((layers - 2) * lengths))
    fewer = -(-lengths * (2 * PPM + (PPM - most) * (layers - 2)) // (layers * capacity * PPM))
    fewer = np.maximum(fewer, -(-lengths // int(most_tokens(settings).min())))
    taken = (most >= least) & (fewer < plain)
    degree = np.where(taken, fewer, plain)
    anywhere = np.array([[capacity], [int(settings.cluster.memory.min())]])
    return degree, _of_shards(lengths, degree, anywhere, settings)


def of_rings(lengths: Ints, ring_start: Ints, ring_ranks: Ints, settings: PlanSettings) -> Ints:
    """Return the least ratio, ppm, at which each sequence fits the ranks of its ring (planner/plan.py), [S]."""
    if not settings.offload:
        return np.zeros(len(lengths), dtype=np.int64)
    holds = np.stack([settings.capacities, settings.cluster.memory])
    alike = bool((holds == holds[:, :1]).all())  # then no ring need be looked at: it is most of the time this takes
    held = holds[:, :1] if alike else np.minimum.reduceat(holds[:, ring_ranks], ring_start[:-1], axis=1)
    return _of_shards(lengths, np.diff(ring_start), held, settings)


def _of_shards(lengths: Ints, degrees: Ints, holds: Ints, settings: PlanSettings) -> Ints:
    """Return the least ratio, ppm, at which each sequence's largest shard fits alone, [S]; 0 if it fits whole.

    `holds` [2, S or 1] are the least capacity, in tokens, and the least memory, in bytes, of the ranks of its ring.
    """
    tokens = -(-lengths // degrees)
    return least_ratio(settings.costs, tokens, tokens, *np.broadcast_to(holds, (2, len(lengths))))


def least_offload(tokens: int, capacity: int, memory: int, settings: PlanSettings) -> Load:
    """Return the micro-batch of so many tokens with no more on the host than lets it fit, or as much as is allowed."""
    return Load(tokens, tokens, min(least(settings.costs, tokens, capacity, memory), settings.offload))


def fitted(plan: StepPlan, settings: PlanSettings) -> StepPlan:
    """Return the plan with more of a micro-batch on the host where its tokens fit only so, whole sequences too.

    And with less of it where a ring's other ranks, of less memory, need more than this one's host has room for.
    """
    full, memory = np.int64(settings.capacities.max()), int(settings.cluster.memory.min())
    if not settings.offload or int(settings.costs.peak_bytes(full, full)) <= memory:
        return plan
    holds = np.stack([settings.capacities, settings.cluster.memory])[:, plan.micro_rank]
    tokens, buffers = micro_loads(plan)
    ratio = np.minimum(least_ratio(settings.costs, tokens, buffers, *holds), settings.offload)
    allowed = room.most_ratio(settings.costs, tokens, settings.host_memory)
    return replace(plan, offload=np.maximum(np.minimum(plan.offload, allowed), ratio))
