"""From what was measured to the calibration, and how well the cost model with it gives the measured times back.

Micro-batches of whole sequences give the terms of T(s) = a s^2 + b s + g, which is linear in them:

```
 T = attention FLOPs / rate + linear FLOPs of (tokens + half_tokens) / rate
     + sequence_s x layers x sequences + layer_s x layers + micro_batch_s
```
once for forward and backward together, and once for the forward pass, which gives the two ratios.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.config.schema import Config
from engine.cost import flops
from engine.cost.activations import saved_bytes
from engine.cost.calibration import Calibration
from engine.cost.datasheets import nominal, sheet_peak
from engine.cost.states import element_bytes, update_bytes
from engine.errors import PreflightError
from engine.hardware.least_squares import Floats, fit
from engine.hardware.measured import Case, Measured
from engine.hardware.predict import seconds
from engine.hardware.prepare import with_layers
from engine.hardware.ring_fit import fit_rings, link


@dataclass(frozen=True)
class Point:
    """A micro-batch: its measured time, and what the cost model says with the calibration."""

    case: Case
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Return the relative error of the prediction."""
        return self.predicted_s / self.measured_s - 1


def calibrate(measured: Measured, config: Config) -> Calibration:
    """Return the calibration of the config's cluster; `config` is the one that was measured with.

    Raises PreflightError where the timings are too disturbed to give a rate.
    """
    reduce_rate, step_s = _whole_step(measured, config)
    found = replace(_compute(measured, config), reduce_bytes_per_s=reduce_rate, step_s=step_s)
    if measured.ranks == 1:
        return found
    latency, rate = link(measured.transfers)
    found = replace(found, latency_s=latency, node_bytes_per_s=rate, overlap=measured.overlap)
    return fit_rings([timed for timed in measured.micro_batches if timed[0].shared], found, config)


def points(measured: Measured, calibration: Calibration, config: Config) -> list[Point]:
    """Return all measured micro-batches, those with rings too, beside what the cost model says of them."""
    return [Point(case, timing.total_s, seconds(case, calibration, config)) for case, timing in measured.micro_batches]


def saved_line(measured: Measured) -> tuple[float, float]:
    """Return a and b of Act(s) = a s + b, in bytes (equation 3 of ByteScale), all measured layers together."""
    tokens, counted = (np.array(column, dtype=np.float64) for column in zip(*measured.saved, strict=True))
    a, b = fit(np.stack([tokens, np.ones_like(tokens)], axis=1), counted, counted).tolist()
    return a, b


def _compute(measured: Measured, config: Config) -> Calibration:
    """Return the data sheet's calibration with the terms of micro-batches replaced by measured ones."""
    chosen = [(case, timing) for case, timing in measured.micro_batches if not case.shared]
    terms = np.array([_terms(case, config, measured.half_tokens) for case, _ in chosen])
    both = _rates(terms, [timing.total_s for _, timing in chosen])
    forward = _rates(terms, [timing.forward_s for _, timing in chosen])
    attention, linear, sequence, layer, micro_batch = both.tolist()
    linear_rate, name = 1 / float(forward[1]), config.cluster.name
    return replace(
        nominal(name),
        device=measured.device,
        source="measured",
        peak_flops_per_s=sheet_peak(name) or max(measured.product_flops_per_s, linear_rate),
        linear_flops_per_s=linear_rate,
        linear_backward=_ratio(linear, float(forward[1])),
        attention_flops_per_s=1 / float(forward[0]),
        attention_backward=_ratio(attention, float(forward[0])),
        half_tokens=measured.half_tokens,
        micro_batch_s=micro_batch,
        layer_s=layer,
        sequence_s=sequence,
        copy_bytes_per_s=measured.copy_bytes_per_s,
        saved_ratio=saved_line(measured)[0] / saved_bytes(config.model, config.dtype),
        memory_bytes_per_s=measured.memory_bytes_per_s,
    )


def _terms(case: Case, config: Config, half: float) -> list[float]:
    """Return what a case has of each unknown: FLOPs of attention and of linear layers, layers x shards, layers, 1."""
    model = with_layers(config, case.layers).model
    pairs = sum(length * (length + 1) / 2 for length in case.whole)
    linear = flops.linear_flops(model) * (sum(case.whole) + half)
    return [flops.attention_flops(model) * pairs, linear, model.layers * len(case.whole), model.layers, 1.0]


def _rates(terms: Floats, times: Sequence[float]) -> Floats:
    values = np.array(times)
    found = fit(terms, values, values)
    if not (found[:2] > 0).all():
        message = "the timings are too disturbed to tell attention from linear layers"
        raise PreflightError(message, hint="run it again while the machine is quiet")
    return found


def _ratio(both: float, forward: float) -> float:
    """Return backward over forward. Two fits on disturbed timings may contradict each other: never below a tenth."""
    return max(both / forward - 1, 0.1)


def _whole_step(measured: Measured, config: Config) -> tuple[float, float]:
    """Return the rate of the reduction, from steps of two sizes, and what is left of a real step."""
    (small, small_s), (large, large_s) = measured.updates
    a_parameter = (large_s - small_s) / (large - small)
    update = update_bytes(config.optimizer, config.dtype) / measured.ranks / measured.memory_bytes_per_s
    known = nominal(config.cluster.name).reduce_bytes_per_s
    if measured.ranks == 1:
        return known, max(0.0, measured.fixed_s - small * update)
    # What is not the update; at least a tenth, should disturbed timings say that nothing is left for it.
    travel = max(a_parameter - update, a_parameter / 10, 1e-13)
    moved = (measured.ranks - 1) / measured.ranks * sum(element_bytes(config.dtype))
    left = measured.fixed_s - small * (travel + update)
    return moved / travel, max(0.0, left)
