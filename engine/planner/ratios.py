"""Activation offload: how many tokens fit in a micro-batch with offload, and the offload ratio that this needs.

With l layers, offload ratio r and capacity C, equation 3 of ByteScale limits a micro-batch of n tokens by the saved
activations that stay on the device: ((2 + (1 - r)(l - 2)) / l) n <= C. The working set of all n tokens and the ring
buffers are needed in addition, and are never offloaded (rule 2 of `verify`).
Letters: P ranks, S sequences. Ratios are in parts per million (ppm).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from engine.compiled import njit
from engine.cost import budget
from engine.cost.budget import least, least_ratio
from engine.cost.times import Rates, token_forward
from engine.planner.plan import loads
from engine.planner.plan.loads import micro_loads
from engine.planner.plan.step_plan import StepPlan
from engine.planner.settings import PlanSettings
from engine.units import PPM, Floats, Ints


@dataclass(frozen=True)
class Load:
    """What determines the memory of a micro-batch."""

    tokens: int
    buffers: int  # tokens of ring buffers: the largest shards of its rings, summed
    offload: int  # offload ratio, ppm
    waiting: tuple[int, ...] | None = None  # in a pipeline: tokens of others in flight on each stage; None: as in 1F1B


def gain(lengths: Ints, settings: PlanSettings) -> Floats:
    """Factor by which offload multiplies a rank's capacity for each sequence if copies overlap with compute, [S].

    From equation 3, with the largest allowed ratio r at which copying the fraction r of a token's activations takes at
    most as long as the token's forward pass, which grows with the length of its sequence.
    """
    return _gain(settings.costs.rates, lengths, settings.offload / PPM, settings.costs.layers)


@njit
def _gain(rates: Rates, lengths: Ints, most: float, layers: int) -> Floats:
    """Compiled part of `gain`, with the largest allowed ratio `most`."""
    found = np.empty(len(lengths))
    for at in range(len(lengths)):
        forward = token_forward(rates, float(lengths[at]))
        found[at] = layers / (2 + (1 - min(most, forward / rates.copy)) * (layers - 2))
    return found


@njit
def _hidden(rates: Rates, lengths: Ints) -> Floats:
    """Ratio at which copies take as long as the forward pass, at most 1, for each sequence, [S]."""
    found = np.empty(len(lengths))
    for at in range(len(lengths)):
        found[at] = min(1.0, token_forward(rates, float(lengths[at])) / rates.copy)
    return found


def equation_3(lengths: Ints, settings: PlanSettings) -> tuple[Ints, Ints]:
    """Ring degree, and offload ratio in ppm, of each sequence by equation 3 of ByteScale, [S] each.

    The degree is that of the largest ratio whose copies hide behind a layer's forward pass, if it is lower than without
    offload. Where the equation's interval for the ratio is empty, nothing is offloaded (our reading of the paper). The
    degree is raised where the working set, which the equation leaves out, would not fit the device or the host. The
    returned ratio is the smallest one at which the shards of this degree fit. Without `settings.equation_3` nothing is
    offloaded.
    """
    layers, capacity = settings.costs.layers, settings.least_capacity
    plain = -(-lengths // capacity)
    if not (settings.equation_3 and settings.offload) or layers <= 2:
        return plain, np.zeros(len(lengths), dtype=np.int64)
    most = np.minimum(settings.offload, (PPM * _hidden(settings.costs.rates, lengths)).astype(np.int64))
    least = np.minimum(PPM, layers * capacity * PPM // ((layers - 2) * lengths))
    fewer = -(-lengths * (2 * PPM + (PPM - most) * (layers - 2)) // (layers * capacity * PPM))
    fewer = np.maximum(fewer, -(-lengths // int(settings.largest_shards.min())))
    taken = (most >= least) & (fewer < plain)
    degree = np.where(taken, fewer, plain)
    # The ranks of the rings are not chosen yet, so the smallest capacity and memory of all ranks count.
    anywhere = np.array([[capacity], [int(settings.cluster.memory.min())]])
    return degree, _of_shards(lengths, degree, anywhere, settings)


def of_rings(lengths: Ints, ring_start: Ints, ring_ranks: Ints, settings: PlanSettings) -> Ints:
    """Smallest offload ratio, in ppm, at which the shards of each sequence fit on the ranks of its ring, [S].

    The ring of sequence i is ring_ranks[ring_start[i] : ring_start[i + 1]]. Each shard is taken to be alone in its
    micro-batch. All ratios are 0 if offload is off; a ratio is PPM if no ratio is enough.
    """
    ratio = np.zeros(len(lengths), dtype=np.int64)
    if not settings.offload:
        return ratio
    degrees, least_capacity = np.diff(ring_start), settings.least_capacity if settings.full_fits else 0
    large = np.flatnonzero(lengths > degrees * least_capacity)  # usually few, or none
    if len(large) > 0:
        holds = np.stack([settings.capacities, settings.cluster.memory])
        # If all ranks are alike, skip the minimum over each ring, which would take most of this function's time.
        if settings.alike:
            held = holds[:, :1]
        else:
            held = np.minimum.reduceat(holds[:, ring_ranks], ring_start[:-1], axis=1)[:, large]
        ratio[large] = _of_shards(lengths[large], degrees[large], held, settings)
    return ratio


def _of_shards(lengths: Ints, degrees: Ints, holds: Ints, settings: PlanSettings) -> Ints:
    """Smallest offload ratio, in ppm, at which each sequence's largest shard fits alone, [S].

    `holds` [2, S or 1]: the smallest capacity, in tokens, and the smallest memory, in bytes, of the ranks of its ring.
    """
    tokens = -(-lengths // degrees)
    return least_ratio(settings.costs, tokens, tokens, *holds)


def least_offload(tokens: int, capacity: int, memory: int, settings: PlanSettings) -> Load:
    """A micro-batch of `tokens`, all in rings, at the smallest offload ratio at which it fits.

    Uses the largest allowed ratio if it fits at none. `capacity` is in tokens, `memory` in bytes.
    """
    return Load(tokens, tokens, min(least(settings.costs, tokens, capacity, memory), settings.offload))


def fits_in_flight(plan: StepPlan, settings: PlanSettings) -> bool:
    """Whether all micro-batches that the plan of a pipeline has in flight together fit on their devices and hosts."""
    if (loads.peak_bytes(plan, settings.costs) > settings.cluster.memory[plan.micro_rank]).any():
        return False
    if not plan.offload.any():
        return True
    away = loads.host_bytes(plan, settings.costs, loads.in_flight(plan, settings.costs))
    return int(away.max()) <= settings.host_memory


def needs_offload(settings: PlanSettings) -> bool:
    """Whether offload is on, and a full micro-batch does not fit every rank without it."""
    return bool(settings.offload) and not settings.full_fits


def fitted(plan: StepPlan, settings: PlanSettings) -> StepPlan:
    """Adjust the plan's offload ratios: raise them where a micro-batch would not fit the device otherwise, and lower
    them where the offloaded activations would not fit the host.

    A ratio can be too high for a rank's host because another rank of the ring, with less memory, needs it.
    """
    if not needs_offload(settings):
        return plan
    tokens, buffers = micro_loads(plan)
    found = _fitted(plan, tokens, buffers, tokens, settings)
    if plan.mode == "pipeline" and not fits_in_flight(found, settings):
        # While one micro-batch computes, the activations of others of its rank are in memory too. So all must leave
        # room for the largest working set and buffers of their rank.
        most, largest = (np.maximum.reduceat(of, plan.micro_start[:-1])[plan.micro_rank] for of in (buffers, tokens))
        found = _fitted(plan, tokens, most, largest, settings)
    return found


def _fitted(plan: StepPlan, tokens: Ints, buffers: Ints, largest: Ints, settings: PlanSettings) -> StepPlan:
    """Adjust the offload ratios to micro-batches of these `tokens`, `buffers` and `largest` [M] (`least_ratio`)."""
    capacity, memory = settings.capacities[plan.micro_rank], settings.cluster.memory[plan.micro_rank]
    needed = np.minimum(least_ratio(settings.costs, tokens, buffers, capacity, memory, largest), settings.offload)
    allowed = budget.most_ratio(settings.costs, tokens, settings.host_memory)
    return replace(plan, offload=np.maximum(np.minimum(plan.offload, allowed), needed))
