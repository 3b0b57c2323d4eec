"""The terms of a calibration as a table: name, value with unit, and how it was measured."""

from __future__ import annotations

from engine.cost.calibration import Calibration
from engine.cost.datasheets import sheet_peak
from engine.hardware.measured import Measured

_MICRO = "fitted to micro-batches of unsplit sequences, forward and backward"
_FORWARD = "fitted to micro-batches of unsplit sequences, forward"
_RING = "fitted to micro-batches with rings of two ranks"
_MESSAGES = "messages of 4 KiB to 4 MiB, in both directions at once"

_HOW = {
    "peak_flops_per_s": "no data sheet: the fastest product of square matrices",
    "linear_flops_per_s": _FORWARD,
    "linear_backward": _MICRO,
    "attention_flops_per_s": _FORWARD,
    "attention_backward": _MICRO,
    "half_tokens": "one linear layer, with one token and with many",
    "micro_batch_s": f"{_MICRO}, with two different layer counts",
    "layer_s": f"{_MICRO}, with two different layer counts",
    "sequence_s": _MICRO,
    "round_s": _RING,
    "merge_bytes_per_s": _RING,
    "latency_s": _MESSAGES,
    "node_bytes_per_s": _MESSAGES,
    "overlap": "a 4 MiB message during a matrix multiplication, and each alone",
    "copy_bytes_per_s": "copies of 64 MiB",
    "reduce_bytes_per_s": "optimizer steps of models of two sizes",
    "memory_bytes_per_s": "optimizer updates of 4M parameters",
    "step_s": "time of a training step outside its micro-batches",
}
_SHEET = ("network_bytes_per_s", "nics_per_node")  # one machine cannot measure the network
_NEED_TWO = ("round_s", "merge_bytes_per_s", "latency_s", "node_bytes_per_s", "overlap", "reduce_bytes_per_s")
NOT_MEASURED = "not measured: from the data sheet, or a nominal value"
_UNITS = (("_flops_per_s", 1e9, "GFLOP/s"), ("_bytes_per_s", 1e9, "GB/s"), ("_s", 1e-3, "ms"))


def rows(calibration: Calibration, measured: Measured) -> list[tuple[str, str, str]]:
    """Return (term, value with its unit, how it was measured) for all terms."""
    unmeasured = _SHEET + (("peak_flops_per_s",) if sheet_peak(calibration.cluster) else ())
    unmeasured += _NEED_TWO if measured.ranks == 1 else ()
    how = _HOW | dict.fromkeys(unmeasured, NOT_MEASURED)
    return [
        (name, shown(name, value), how[name]) for name, value in vars(calibration).items() if not isinstance(value, str)
    ]


def shown(name: str, value: float) -> str:
    """Format a value in the unit that its name ends with, such as GB/s for `copy_bytes_per_s`; else as a number."""
    for ending, size, unit in _UNITS:
        if name.endswith(ending):
            return f"{value / size:.4g} {unit}"
    return f"{value:.3g}"
