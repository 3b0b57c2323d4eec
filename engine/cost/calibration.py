"""Rates of a machine: the only numbers of the cost model that are not computed.

They are measured by `profile-hardware` and read from its file, or come from data sheets (datasheets.py). They are rates
and not the times of one model, so a calibration made with one model also serves for another. For the model it was made
with, it reproduces the measured time of a sequence of s tokens, T(s) = a s^2 + b s + g.
"""

from __future__ import annotations

import json
import reprlib
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.family.parameters import LINEAR_KINDS, LinearKind
from engine.files import write_durably
from engine.format_number import format_number
from engine.readers import read_object

# 1 had no `ring_s`, and counted an all-reduce as a reduce-scatter. In 2 the first round of a ring cost what others do.
# 3 had one rate for all linear layers.
SCHEMA, _OLDEST = 4, 3
PLAN_BUILD_S = 0.07  # where it is not measured: .064 s forward and .075 s backward on one H200 (benchmarks/RESULTS.md)
# An assumption. FP8 has twice the bf16 peak, but both factors of a product are scaled and rounded first. For whole
# steps of an 8B model on 8 H100, torchao reports up to 1.25 (docs.pytorch.org/ao, "Quantized Training").
FP8_SPEEDUP = 1.5


@dataclass(frozen=True)
class Calibration:
    """Rates of one rank (one GPU or one CPU process). Seconds, bytes, and FLOPs counted as in flops.py."""

    cluster: str  # name of the cluster preset that the rates are for
    device: str  # the device that was measured, or whose data sheet was used
    source: str  # `measured`, or where the rates come from
    peak_flops_per_s: float  # dense, from the data sheet; else of the fastest matrix product that was measured
    # Of linear layers, forward, by the kind of their matrix (engine/family/parameters.py).
    projection_flops_per_s: float
    ffn_flops_per_s: float
    expert_flops_per_s: float
    head_flops_per_s: float
    fp8_speedup: float  # rate of projections and dense layers in FP8 / in bf16, with the time to scale and round
    linear_backward: float  # time of the backward pass / time of the forward pass
    attention_flops_per_s: float  # causal attention, forward
    attention_backward: float  # time of the backward pass / time of the forward pass
    half_tokens: float  # reading the weights once per micro-batch takes as long as this many tokens in linear layers
    micro_batch_s: float  # fixed time of a micro-batch outside its layers, forward and backward together
    layer_s: float  # fixed time of a layer of a micro-batch, forward and backward together: kernel launches
    gather_s: (
        float  # fixed time of a layer of a micro-batch if ZeRO-3 gathers its weights, in addition: DeepSpeed's hooks
    )
    sequence_s: float  # fixed time of a shard in a layer, forward and backward together
    round_s: float  # fixed time of each round of rings after the first, in a layer: launching kernels
    ring_s: float  # fixed time of each ring in such a round, in a layer: merging its block, posting its transfers
    merge_bytes_per_s: float  # device memory, reads and writes, while outputs of ring rounds are merged
    latency_s: float  # fixed time of a transfer
    node_bytes_per_s: float  # rank to rank inside a node, each direction
    network_bytes_per_s: float  # a network card, each direction
    nics_per_node: float  # network cards that the ranks of a node share
    overlap: float  # fraction of the shorter of compute and transfer that hides behind the longer, 0 to 1
    copy_bytes_per_s: float  # device to host and back, each direction
    reduce_bytes_per_s: float  # collectives: gradients, weights, rows of a tp group; per rank, inside a node
    memory_bytes_per_s: float  # device memory, for the optimizer's update
    step_s: float  # fixed time of a step
    plan_build_s: float  # cuDNN builds the execution plan of a shape, at its first call in a thread; no part of a cost

    def linear(self, kind: LinearKind) -> float:
        """FLOP/s of the products with matrices of a kind, forward."""
        rate: float = getattr(self, _term(kind))
        return rate

    def of(self, linear_dtype: str) -> Calibration:
        """These rates with products of linear layers in `linear_dtype` of a config.

        Weights are read in bf16 and rounded in each micro-batch, so reading them takes as long as before.
        """
        if linear_dtype != "fp8":
            return self
        speed = self.fp8_speedup
        return replace(
            self,
            projection_flops_per_s=speed * self.projection_flops_per_s,
            ffn_flops_per_s=speed * self.ffn_flops_per_s,
            half_tokens=speed * self.half_tokens,
            source=f"{self.source}; projections and dense layers in FP8 {speed:g} times as fast",
        )

    def write(self, path: Path) -> None:
        """Write the file that `read` reads, atomically."""
        write_durably(path, (json.dumps({"schema": SCHEMA, **asdict(self)}, indent=2) + "\n").encode())


def _term(kind: LinearKind) -> str:
    return f"{kind}_flops_per_s"


def alike(flops_per_s: float) -> dict[str, Any]:
    """The terms of all kinds of linear layers, if they have the same rate."""
    return dict.fromkeys(LINEAR_TERMS, flops_per_s)


LINEAR_TERMS = tuple(map(_term, LINEAR_KINDS))
_ALL_LINEAR = "linear_flops_per_s"  # in format 3, the rate of all kinds
_TEXT = ("cluster", "device", "source")
_LEAST, _MOST = 1e-12, 1e30  # values beyond these are errors, and products would overflow
NEVER_S = _MOST  # as `plan_build_s`: no shape gets a plan
_MAY_BE_ZERO = (
    *("half_tokens", "micro_batch_s", "layer_s", "sequence_s", "round_s", "ring_s", "latency_s", "overlap", "step_s"),
    *("gather_s", "plan_build_s"),
)
_OLD = ("saved_ratio",)  # terms of earlier versions, ignored
_NEW: dict[str, Any] = {  # terms that files of earlier versions lack
    "plan_build_s": PLAN_BUILD_S,
    "fp8_speedup": FP8_SPEEDUP,
}


def read(path: Path, cluster: str) -> Calibration:
    """Read a calibration file made for the cluster preset `cluster`.

    Raises ConfigError if the file cannot be read, lacks terms, has a bad value, or was made for another cluster.
    """
    try:
        found = read_object(path, error=ConfigError)
    except OSError as error:
        raise _refusal(path, f"it cannot be read: {error.strerror}") from error
    except ConfigError as error:  # at the file, or at a line of it
        raise _refusal(error.problems[0].key or path, f"it {error}") from error
    try:
        written = format_number(found, SCHEMA, str(path), ConfigError, key="schema")
    except ConfigError as error:
        raise _refusal(path, f"it {error}") from error
    if written < _OLDEST:
        raise _refusal(path, f"it is not a calibration file of format {_OLDEST} or {SCHEMA}")
    found = {name: value for name, value in found.items() if name != "schema"}
    found = _NEW | found
    names = [field.name for field in fields(Calibration)]
    if written < SCHEMA:
        names = [name for name in names if name not in LINEAR_TERMS] + [_ALL_LINEAR]
    missing = [name for name in names if name not in found]
    unknown = [name for name in found if name not in names and name not in _OLD]
    if missing or unknown:
        raise _refusal(path, f"terms missing: {', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}")
    for name in names:
        problem = _problem(name, found[name])
        if problem is not None:
            raise _refusal(path, f"{name} {problem}, not {reprlib.repr(found[name])}")
    if found["cluster"] != cluster:
        raise _refusal(path, f"it was made for cluster={found['cluster']}, not for cluster={cluster}")
    # Whole numbers become floats: compiled functions would be compiled again for integers.
    terms: dict[str, Any] = {name: found[name] if name in _TEXT else float(found[name]) for name in names}
    return Calibration(**terms if written == SCHEMA else alike(terms.pop(_ALL_LINEAR)) | terms)


def _problem(name: str, value: Any) -> str | None:
    """Say what the value of a term must be, if it is invalid; else None."""
    if name in _TEXT:
        return None if isinstance(value, str) else "must be text"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "must be a number"
    if name == "overlap" and value > 1:
        return "must be from 0 to 1"
    least = 0 if name in _MAY_BE_ZERO else _LEAST
    return None if least <= value <= _MOST else f"must be from {least} to {_MOST}"


def _refusal(path: Path | str, reason: str) -> ConfigError:
    message = f"the calibration {path} cannot be used: {reason}"
    return ConfigError(message, key="cluster.calibration", hint="make one with `bytescale profile-hardware`")
