"""The terms of a calibration as a table: name, value with unit, and how it was measured."""

from __future__ import annotations

from engine.config.units import counted, format_bytes
from engine.cost.calibration import LINEAR_TERMS, Calibration
from engine.cost.datasheets import sheet_peak
from engine.hardware.measured import Measured

_MICRO = "fitted to micro-batches of unsplit sequences, forward and backward"
_FORWARD = "fitted to micro-batches of unsplit sequences, forward"
_RING = "fitted to micro-batches with rings of two ranks"

_HOW = {
    "peak_flops_per_s": "no data sheet: the fastest product of square matrices",
    **dict.fromkeys(LINEAR_TERMS, f"{_FORWARD}; one rate for all kinds of linear layers"),
    "linear_backward": _MICRO,
    "attention_flops_per_s": _FORWARD,
    "attention_backward": _MICRO,
    "half_tokens": "one linear layer, with one token and with many",
    "micro_batch_s": f"{_MICRO}, with two different layer counts",
    "layer_s": f"{_MICRO}, with two different layer counts",
    "gather_s": "a short micro-batch with ZeRO-3, and the same one with ZeRO-1",
    "sequence_s": _MICRO,
    "round_s": _RING,
    "ring_s": f"{_RING}, with different numbers of rings",
    "merge_bytes_per_s": _RING,
    "overlap": "a message during a matrix product of the same duration, and each alone",
    "reduce_bytes_per_s": "optimizer steps of models of two sizes",
    "memory_bytes_per_s": "optimizer updates of 4M parameters (128M on a GPU)",
    "step_s": "time of a training step outside its micro-batches",
    "plan_build_s": "the first attention call with a shape and the next, mean of forward and backward",
}
# Terms that need two nodes, or two ranks, to be measured; without them they keep the value of the data sheet.
_NEED_NODES = ("network_bytes_per_s", "nics_per_node")
_NEED_RANKS = (
    *("gather_s", "round_s", "ring_s", "merge_bytes_per_s", "latency_s", "node_bytes_per_s", "overlap"),
    "reduce_bytes_per_s",
)
_OF_RINGS = ("round_s", "ring_s", "merge_bytes_per_s")
_UNITS = (("_flops_per_s", 1e9, "GFLOP/s"), ("_bytes_per_s", 1e9, "GB/s"), ("_s", 1e-3, "ms"))


def nominal_terms(calibration: Calibration, measured: Measured) -> dict[str, str]:
    """Return the terms that were not measured, and what measuring them needs. They have nominal values."""
    found = {"fp8_speedup": "an assumption"}
    if sheet_peak(calibration.cluster):
        found["peak_flops_per_s"] = "as on the data sheet"
    if measured.network is None:
        found |= dict.fromkeys(_NEED_NODES, "needs a hostfile of two nodes")
    if measured.ranks == 1:
        found |= dict.fromkeys(_NEED_RANKS, "needs two ranks")
    elif not measured.rings:
        found |= dict.fromkeys(_OF_RINGS, "needs longer rings, which keep the GPU busy")
    if measured.ranks == 1 and measured.network is not None:
        del found["latency_s"]
    if measured.plan_build_s is None:
        found["plan_build_s"] = "needs a GPU on which attention uses cuDNN"
    return found


def rows(calibration: Calibration, measured: Measured) -> list[tuple[str, str, str]]:
    """Return (term, value with its unit, how it was measured) for all terms."""
    how = _HOW | _from_messages(measured)
    if len({case.layers for case, _ in measured.micro_batches if not case.ring}) == 1:
        how |= dict.fromkeys(("micro_batch_s", "layer_s"), f"{_MICRO}; not separated, with one layer count")
    how |= {name: f"nominal, not measured: {need}" for name, need in nominal_terms(calibration, measured).items()}
    return [
        (name, shown(name, value), how[name]) for name, value in vars(calibration).items() if not isinstance(value, str)
    ]


def _from_messages(measured: Measured) -> dict[str, str]:
    """Describe how the terms of messages and copies were measured."""
    copies, network = measured.copies, measured.network
    how = {
        "copy_bytes_per_s": f"copies of 64 MiB, the slower direction; {copies.at_once / 1e9:.4g} GB/s each way at once"
    }
    if measured.transfers:
        sizes = " to ".join(format_bytes(measured.transfers[end][0]) for end in (0, -1))
        how |= dict.fromkeys(("latency_s", "node_bytes_per_s"), f"messages of {sizes}, in both directions at once")
    if network is not None:
        how["network_bytes_per_s"] = f"messages between two nodes, by {counted(network.pairs, 'pair')} of ranks at once"
        how["nics_per_node"] = "the same, divided by the rate of one pair alone"
        how["latency_s"] = "messages inside a node and between nodes: the longer of both"
    return how


def shown(name: str, value: float) -> str:
    """Format a value in the unit that its name ends with, such as GB/s for `copy_bytes_per_s`; else as a number."""
    for ending, size, unit in _UNITS:
        if name.endswith(ending):
            return f"{value / size:.4g} {unit}"
    return f"{value:.3g}"
