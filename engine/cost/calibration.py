"""What a machine does in a second: the only numbers of the cost model that are not arithmetic.

They are measured by `profile-hardware` and read from its file, or come from data sheets (`datasheets.py`). Rates, not
times of one model, so that a calibration made with one model serves for another; for the model that it was made with
it gives back the measured T(s) = a s^2 + b s + g.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.files import write_durably

SCHEMA = 1


@dataclass(frozen=True)
class Calibration:
    """Rates of one rank (one GPU or one CPU process). Seconds, bytes, FLOPs counted as in `flops.py`."""

    cluster: str  # name of the cluster preset that it is for
    device: str  # what was measured, or whose data sheet it is
    source: str  # `measured`, or where the figures come from
    peak_flops_per_s: float  # the data sheet's, dense; where there is none, the fastest product that was measured
    linear_flops_per_s: float  # linear layers, forward
    linear_backward: float  # time of the backward pass over that of the forward pass
    attention_flops_per_s: float  # causal attention, forward
    attention_backward: float  # time of the backward pass over that of the forward pass
    half_tokens: float  # a micro-batch costs as much as this many more tokens in the linear layers: weights are read
    micro_batch_s: float  # a micro-batch, however small, forward and backward together, beside its layers
    layer_s: float  # a layer of a micro-batch, forward and backward together: kernel launches
    sequence_s: float  # a shard in a layer, forward and backward together
    round_s: float  # a round of a ring in a layer: kernels of a block, posting a transfer
    merge_bytes_per_s: float  # merging a block's output: reads and writes of device memory
    latency_s: float  # a transfer, however small
    node_bytes_per_s: float  # rank to rank inside a node, each direction
    network_bytes_per_s: float  # a network card, each direction
    nics_per_node: float  # network cards that the ranks of a node share
    overlap: float  # share of the shorter of compute and transfer that hides behind the longer, 0 to 1
    copy_bytes_per_s: float  # device to host and back, each direction
    reduce_bytes_per_s: float  # gradients reduced and weights gathered, a rank, inside a node
    memory_bytes_per_s: float  # device memory, for the optimizer's update
    step_s: float  # a step, however small
    saved_ratio: float  # saved activations of a token, counted, over memory.saved_bytes: told, not computed with

    def write(self, path: Path) -> None:
        """Write the file that `read` reads, whole or not at all."""
        write_durably(path, (json.dumps({"schema": SCHEMA, **asdict(self)}, indent=2) + "\n").encode())


_WORDS = ("cluster", "device", "source")
_LEAST, _MOST = 1e-12, 1e30  # what lies beyond is a mistake, and overflows in products
_MAY_BE_ZERO = ("half_tokens", "micro_batch_s", "layer_s", "sequence_s", "round_s", "latency_s", "overlap", "step_s")


def read(path: Path, cluster: str) -> Calibration:
    """Return the calibration in a file.

    Raises ConfigError where it is no such file, lacks terms, or is of another cluster.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _refusal(path, f"it cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise _refusal(path, f"it is not JSON: {error}") from error
    if not isinstance(found, dict) or found.pop("schema", None) != SCHEMA:
        raise _refusal(path, f"it is no calibration of schema {SCHEMA}")
    names = [field.name for field in fields(Calibration)]
    missing = [name for name in names if name not in found]
    unknown = [name for name in found if name not in names]
    if missing or unknown:
        raise _refusal(path, f"terms missing: {', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}")
    for name in names:
        problem = _problem(name, found[name])
        if problem is not None:
            raise _refusal(path, f"{name} {problem}, not {found[name]!r}")
    if found["cluster"] != cluster:
        raise _refusal(path, f"it was made for cluster={found['cluster']}, not for cluster={cluster}")
    terms: dict[str, Any] = {name: value if name in _WORDS else float(value) for name, value in found.items()}
    return Calibration(**terms)


def _problem(name: str, value: object) -> str | None:
    if name in _WORDS:
        return None if isinstance(value, str) else "must be text"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "must be a number"
    if name == "overlap" and value > 1:
        return "must be from 0 to 1"
    least = 0 if name in _MAY_BE_ZERO else _LEAST
    return None if least <= value <= _MOST else f"must be from {least} to {_MOST}"


def _refusal(path: Path, reason: str) -> ConfigError:
    message = f"the calibration {path} cannot be used: {reason}"
    return ConfigError(message, key="cluster.calibration", hint="make one with `bytescale profile-hardware`")
