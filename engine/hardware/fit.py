"""Fits a calibration to the measurements, and compares the resulting cost model with the measured times.

Micro-batches of unsplit sequences determine the terms of their time T, which is linear in the unknowns (the inverse
rates and the times that end in _s):

```
 T = attention FLOPs / rate + linear FLOPs of (tokens + half_tokens) / rate
     + sequence_s x layers x sequences + layer_s x layers + micro_batch_s
```
T is fitted to forward and backward together, and to the forward pass alone; the two fits give the ratios of backward
to forward time. Micro-batches with rings then determine the terms of a ring.

Errors of micro-batches count relative to the square root of the measured time. A step is a sum of micro-batches, most
of them full, so the large ones must be right. With relative errors the many small ones would decide.

On GPUs, micro-batches that take as long as launching their kernels are left out (`split_launch_bound`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from engine.config.schema import Config
from engine.cost import flops
from engine.cost.calibration import Calibration, alike
from engine.cost.collectives import collectives, hops
from engine.cost.datasheets import nominal, sheet_peak
from engine.cost.model import Costs, rates_of
from engine.cost.sizes import parameters, update_bytes
from engine.cost.times import hide, pairs, together, unsplit
from engine.errors import PreflightError
from engine.hardware.measured import Case, Measured, Network, Timing
from engine.hardware.prepare import with_layers
from engine.job import Job
from engine.units import NS, Floats

_NEWTON_STEPS = 6
_SLOPE_STEPS = (1e-6, 1e-6, 1e-12)  # finite differences of round_s, ring_s and seconds per merged byte, for the slopes
_LEAST_S_PER_BYTE = 1e-15  # keeps a rate finite if the fit attributes no time to its bytes
_BUSY = 1.25  # times the shortest micro-batch: shorter ones count as launch-bound
_FEWEST = 6  # micro-batches without rings, to fit the five terms of their time to


@dataclass(frozen=True)
class Point:
    """A micro-batch: its measured time, and the cost model's prediction with the calibration."""

    case: Case
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_s / self.measured_s - 1


def predict(case: Case, calibration: Calibration, config: Config) -> float:
    """Predict the seconds of a case with the cost model of planner and simulator. Rings span all ranks."""
    cluster = Job(config).cluster  # ranks that measure are devices
    rates = rates_of(with_layers(config, case.layers), calibration, cluster, cluster)
    alone = sum(unsplit(rates, float(length)) for length in case.unsplit)
    causal = float(sum(pairs(rates, float(length)) for length in case.ring))
    rings = together(rates, float(sum(case.ring)), causal, len(case.ring), cluster.ranks, 1.0) if case.ring else 0.0
    return float(rates.micro + alone + rings) / NS


def points(measured: Measured, calibration: Calibration, config: Config) -> list[Point]:
    """Return all micro-batches in `measured`, with and without rings, with their predictions."""
    return [Point(case, timing.total_s, predict(case, calibration, config)) for case, timing in measured.micro_batches]


def split_launch_bound(measured: Measured) -> tuple[Measured, tuple[tuple[Case, Timing], ...]]:
    """Return the measurements of a GPU without the launch-bound micro-batches, and these micro-batches.

    A GPU computes while its host launches the next kernels, so each pass takes the longer of both times. The cost model
    adds a fixed time instead. Fitted to launch-bound micro-batches, the fixed time absorbs time of linear layers, whose
    rate becomes too high. A micro-batch counts as launch-bound if one of its passes takes less than 1.25 times that of
    the shortest micro-batch with as many layers; those with rings are compared with each other, because rings launch
    more kernels. Raises PreflightError if fewer than six without rings are left.
    """
    passes: dict[tuple[int, bool], list[tuple[float, float]]] = defaultdict(list)
    for case, timing in measured.micro_batches:
        passes[case.layers, bool(case.ring)].append((timing.forward_s, timing.backward_s))
    shortest = {kind: np.min(times, axis=0) for kind, times in passes.items()}
    used: list[tuple[Case, Timing]] = []
    launch_bound: list[tuple[Case, Timing]] = []
    for case, timing in measured.micro_batches:
        least = _BUSY * shortest[case.layers, bool(case.ring)]
        busy = timing.forward_s >= least[0] and timing.backward_s >= least[1]
        (used if busy else launch_bound).append((case, timing))
    count = sum(not case.ring for case, _ in used)
    if count < _FEWEST:
        longest = max(sum(case.unsplit) for case, _ in measured.micro_batches)
        message = f"{count} micro-batches of up to {longest:,} tokens keep the GPU busy; a calibration needs {_FEWEST}"
        hint = "run it again while no other program uses the machine, or use a recipe with a larger model"
        raise PreflightError(message, hint=hint)
    return replace(measured, micro_batches=tuple(used)), tuple(launch_bound)


def calibrate(measured: Measured, config: Config) -> Calibration:
    """Fit the calibration of the config's cluster; `config` is the one that the ranks measured with.

    With one rank no communication is measured, and its terms keep their nominal values. The same applies to the network
    if no second node was measured, and to rings if too few micro-batches have one. Raises PreflightError if the timings
    are too noisy to give a rate.
    """
    reduce_rate, step_s = _whole_step(measured, config)
    found = replace(_compute(measured, config), reduce_bytes_per_s=reduce_rate, step_s=step_s)
    if measured.network is not None:
        latency, card, cards = between_nodes(measured.network)
        found = replace(found, latency_s=latency, network_bytes_per_s=card, nics_per_node=cards)
    if measured.ranks == 1:
        return found
    latency, rate = link(measured.transfers)
    if measured.network is not None:
        latency = max(latency, found.latency_s)  # the cost model has one latency, inside a node and between nodes
    found = replace(found, latency_s=latency, node_bytes_per_s=rate, overlap=measured.overlap)
    if measured.sharded is not None:
        found = replace(found, gather_s=fit_gather(*measured.sharded, found, config))
    return fit_rings(measured.rings, found, config) if measured.rings else found


def _compute(measured: Measured, config: Config) -> Calibration:
    """Return the nominal calibration with its compute and memory terms replaced by measured ones."""
    timed = [(case, timing) for case, timing in measured.micro_batches if not case.ring]
    rows = []  # per case: FLOPs of attention, FLOPs of linear layers, layers x sequences, layers, 1
    for case, _ in timed:
        model = with_layers(config, case.layers).model
        scores = sum(flops.attention_flops(flops.attention(model), length) for length in case.unsplit)
        linear = flops.linear_flops(model) * (sum(case.unsplit) + measured.half_tokens)
        rows.append([scores, linear, model.layers * len(case.unsplit), model.layers, 1.0])

    def fitted(times: Sequence[float]) -> list[float]:
        # Errors count relative to the square root of the time (see the module's docstring).
        values = np.array(times)
        found = least_squares(np.array(rows), values, np.sqrt(values))
        if not (found[:2] > 0).all():
            message = "the timings are too noisy to separate attention from linear layers"
            raise PreflightError(message, hint="run it again while no other program uses the machine")
        return list(found.tolist())

    # The fixed times are those of both passes together, because the cost model does not divide them.
    attention, linear, sequence, layer, micro_batch = fitted([timing.total_s for _, timing in timed])
    attention_forward, linear_forward, *_ = fitted([timing.forward_s for _, timing in timed])
    name = config.cluster.name
    return replace(
        nominal(name),
        device=measured.device,
        source="measured",
        # At least the rate of linear layers, or the MFU could exceed 1.
        peak_flops_per_s=sheet_peak(name) or max(measured.product_flops_per_s, 1 / linear_forward),
        # Ratios backward / forward are at least a tenth, because two fits of noisy timings may contradict each other.
        **alike(1 / linear_forward),
        linear_backward=max(linear / linear_forward - 1, 0.1),
        attention_flops_per_s=1 / attention_forward,
        attention_backward=max(attention / attention_forward - 1, 0.1),
        half_tokens=measured.half_tokens,
        micro_batch_s=micro_batch,
        layer_s=layer,
        sequence_s=sequence,
        # A micro-batch copies in one direction at a time: to the host in its forward pass, back in its backward pass.
        copy_bytes_per_s=min(measured.copies.to_host, measured.copies.to_device),
        memory_bytes_per_s=measured.memory_bytes_per_s,
        plan_build_s=nominal(name).plan_build_s if measured.plan_build_s is None else measured.plan_build_s,
    )


def _whole_step(measured: Measured, config: Config) -> tuple[float, float]:
    """Return the bytes/s of the gradient reduction, and the fixed seconds of a training step.

    The reduction follows from the optimizer's steps of models of two sizes; with one rank its rate is nominal. The
    fixed time is a step without its micro-batches, update, reduction and the hops of both.
    """
    (small, small_s), (large, large_s) = measured.updates
    s_per_parameter = (large_s - small_s) / (large - small)
    update = sum(update_bytes(config.optimizer, config.dtype)) / measured.ranks / measured.memory_bytes_per_s
    if measured.ranks == 1:
        known = nominal(config.cluster.name).reduce_bytes_per_s
        return known, max(0.0, measured.fixed_s - small * update)
    # The time that the update does not explain, but at least a tenth: noisy timings may leave nothing.
    reduce = max(s_per_parameter - update, s_per_parameter / 10, 1e-13)
    sent = collectives(config, measured.ranks)
    # The models are so small that they have one bucket, whose gather nothing hides.
    moved = (sent.step + sent.gather) / parameters(config.model)
    latency = 2 * hops(measured.ranks) * link(measured.transfers)[0]
    return moved / reduce, max(0.0, measured.fixed_s - small * (reduce + update) - latency)


def link(transfers: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Fit the latency in seconds and the bytes/s to the (bytes, seconds) of messages."""
    sizes, times = (np.array(column, dtype=np.float64) for column in zip(*transfers, strict=True))
    latency, s_per_byte = least_squares(np.stack([np.ones_like(sizes), sizes], axis=1), times, times).tolist()
    return latency, 1 / max(s_per_byte, _LEAST_S_PER_BYTE)


def between_nodes(network: Network) -> tuple[float, float, float]:
    """Return the latency in seconds, the bytes/s of a network card each way, and the cards that a node's ranks share.

    One pair of ranks alone uses one card; all pairs together use all of them. Cards that no pair uses are not counted.
    """
    latency, alone = link(network.alone)
    total = network.pairs * link(network.together)[1]
    cards = max(1, round(total / alone))
    return latency, total / cards, float(cards)


def fit_gather(whole: Timing, sharded: Timing, known: Calibration, config: Config) -> float:
    """Return the seconds of a layer that ZeRO-3 adds to a micro-batch, in addition to the bytes that it moves.

    `whole` is the micro-batch with ZeRO-1, `sharded` the same one with ZeRO-3.
    """
    unknown = sharded.total_s - sharded_s(whole, replace(known, gather_s=0.0), config)
    return max(0.0, unknown / config.model.layers)


def sharded_s(whole: Timing, calibration: Calibration, config: Config) -> float:
    """Predict the seconds of a micro-batch with ZeRO-3 from its time `whole` with ZeRO-1, as a lockstep slot."""
    zero = config.zero.model_copy(update={"stage": 3})
    costs = Costs.of(config.model_copy(update={"zero": zero}), Job(config).cluster, calibration)
    passes = zip((whole.forward_s, whole.backward_s), costs.gathers, strict=True)
    return sum(hide(costs.rates, NS * seconds, gather) for seconds, gather in passes) / NS + costs.slot / NS


def fit_rings(timed: Sequence[tuple[Case, Timing]], known: Calibration, config: Config) -> Calibration:
    """Fit round_s, ring_s and merge_bytes_per_s to micro-batches with rings, with all other terms known.

    The time of rings (engine/cost/times.py) is piecewise linear in x = (round_s, ring_s, 1 / merge_bytes_per_s), so a
    few Newton steps suffice. Overlap is measured separately, because it cannot be seen in rings whose compute takes
    longer than their transfers.
    """
    times = np.array([timing.total_s for _, timing in timed])

    def calibration(x: Floats) -> Calibration:
        each, merged = float(x[1]), max(float(x[2]), _LEAST_S_PER_BYTE)
        return replace(known, round_s=float(x[0]), ring_s=each, merge_bytes_per_s=1 / merged)

    def predicted(x: Floats) -> Floats:
        return np.array([predict(case, calibration(x), config) for case, _ in timed])

    x = np.zeros(3)
    for _ in range(_NEWTON_STEPS):
        here = predicted(x)
        columns = [(predicted(x + step) - here) / step.sum() for step in np.diag(_SLOPE_STEPS)]
        slopes = np.stack(columns, axis=1)
        x = least_squares(slopes, times - here + slopes @ x, np.sqrt(times))
    return calibration(x)


def least_squares(terms: Floats, values: Floats, scale: Floats) -> Floats:
    """Solve non-negative least squares: the x >= 0, [unknowns], that minimises sum(((terms @ x - values) / scale)^2).

    terms is [points, unknowns]; values and scale, which is positive, are [points]. The best x solves the unconstrained
    problem of its non-zero unknowns (Lawson and Hanson 1974), so all subsets of the unknowns are tried, which is fast
    for a few.
    """
    rows, target = terms / scale[:, None], values / scale
    size = np.abs(rows).max(0)  # scales each column to a maximum of 1, whatever its unit
    size[size == 0] = 1.0
    best, least = np.zeros(terms.shape[1]), float((target**2).sum())  # the error of x = 0
    for count in range(1, terms.shape[1] + 1):
        for support in combinations(range(terms.shape[1]), count):
            columns = (rows / size)[:, support]
            found = np.linalg.lstsq(columns, target, rcond=None)[0]
            error = float(((columns @ found - target) ** 2).sum())
            if (found >= 0).all() and error < least * (1 - 1e-9):
                best, least = np.zeros(terms.shape[1]), error
                best[list(support)] = found
    x: Floats = best / size
    return x
