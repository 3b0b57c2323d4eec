"""The micro-batches to measure, and all measurements as plain data. Rank 0 writes them; the command fits them.

All times are in seconds: the median over repetitions, then the mean over ranks. All ranks measure the same at the same
time, as in training, where neighbours share caches and memory bandwidth. Does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.config.units import counted
from engine.readers import read_object

RESULT, NETWORK = "measured.json", "network.json"  # in the folder of the ranks
_SHORTEST = 32  # tokens
# Even counts of sequences by mean length: micro-batches of several sequences, up to the size of training's. Only GPUs
# measure those of 32K tokens.
_PACKS = {32: (4, 16, 64), 128: (4, 8, 32, 64), 512: (2, 8, 16, 64), 2048: (2, 4, 16)}
_OTHER = (32, 128, 512)  # tokens, for the model with the other number of layers
_OTHER_PACKS = {2048: (16,)}  # the same as _PACKS, for that model
_MIXED = ((512, (96, 160)), (2048, (512, 96, 160, 24, 40)))  # (ring, unsplit sequences) of one micro-batch
_RINGS = {32: (8, 64, 256), 128: (4, 16, 64), 512: (4, 16), 2048: (16,)}  # the same as _PACKS, of rings
_FEWEST_RINGS = 4  # micro-batches with rings, to fit the three terms of rings to


@dataclass(frozen=True)
class Case:
    """A micro-batch of a model with `layers` layers, by the lengths of its sequences."""

    layers: int
    unsplit: tuple[int, ...] = ()
    ring: tuple[int, ...] = ()  # sequences that are split over all ranks

    def __str__(self) -> str:
        """For example `2 layers, 4 x 128, ring of 2048`."""
        counts = [f"{self.unsplit.count(length)} x {length}" for length in sorted(set(self.unsplit))]
        rings = [(self.ring.count(length), length) for length in sorted(set(self.ring))]
        named = [f"ring of {length}" if count == 1 else f"{count} rings of {length}" for count, length in rings]
        return ", ".join([counted(self.layers, "layer"), *counts, *named])


def cases(layers: int, other: int | None, ranks: int, longest: int) -> list[Case]:
    """List micro-batches of at most `longest` tokens, chosen so that each term of their time can be fitted (`fit.py`).

    `other` is a second number of layers, which separates the fixed time per layer from that per micro-batch; None
    leaves it out. Cases with rings are included if there are at least two ranks.
    """
    lengths = [_SHORTEST]
    while 2 * lengths[-1] <= longest:
        lengths.append(2 * lengths[-1])
    found = [Case(layers, (length,)) for length in lengths]
    found += [Case(layers, pack) for pack in _several(_PACKS, longest)]
    if other is not None:
        found += [Case(other, (length,)) for length in _OTHER if length <= longest]
        found += [Case(other, pack) for pack in _several(_OTHER_PACKS, longest)]
    if ranks > 1:
        found += [Case(layers, ring=(length,)) for length in lengths]
        found += [Case(layers, unsplit, (ring,)) for ring, unsplit in _MIXED if ring + sum(unsplit) <= longest]
        found += [Case(layers, ring=rings) for rings in _several(_RINGS, longest)]
    return found


def _several(counts: Mapping[int, tuple[int, ...]], longest: int) -> list[tuple[int, ...]]:
    """Return the lengths of the sequences of each micro-batch in `counts` that has at most `longest` tokens.

    They are a quarter shorter and a quarter longer than the mean, in turn. Neighbours of equal length are rare in
    training, and the kernel for CPUs computes them in one call, which is faster.
    """
    return [
        (length * 3 // 4, length * 5 // 4) * (count // 2)
        for length, some in counts.items()
        for count in some
        if length * count <= longest
    ]


@dataclass(frozen=True)
class Timing:
    """Seconds of a forward and a backward pass; `spread` is (median - best) / best of their sum over repetitions.

    For an operation without passes, such as a copy, `forward_s` is its time and `backward_s` is 0.
    """

    forward_s: float
    backward_s: float
    spread: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Copies:
    """Rates of copies between a device and its host, in bytes/s. On a CPU, all of them are copies in memory."""

    to_host: float
    to_device: float
    at_once: float  # each direction, while both run


@dataclass(frozen=True)
class Network:
    """Messages that pairs of ranks on two nodes exchange, in both directions at once."""

    pairs: int  # rank i of the first node and rank i of the second
    alone: tuple[tuple[int, float], ...]  # (bytes each way, s) while one pair exchanges messages
    together: tuple[tuple[int, float], ...]  # the same while all pairs do


@dataclass(frozen=True)
class Measured:
    """All measurements of the ranks."""

    device: str
    ranks: int
    layers: int  # of the trained model
    half_tokens: float  # tokens that a linear layer computes in the time in which it reads its weights
    product_flops_per_s: float  # of the fastest product of square matrices
    micro_batches: tuple[tuple[Case, Timing], ...]
    transfers: tuple[tuple[int, float], ...]  # (bytes each way, s); empty on one rank
    sharded: tuple[Timing, Timing] | None  # a micro-batch with ZeRO-1 and with ZeRO-3; None on one rank
    overlap: float  # of transfer and compute, 0 to 1, as in the calibration; 0 on one rank
    updates: tuple[tuple[int, float], ...]  # (parameters, s) of an optimizer step, for models of two sizes
    copies: Copies
    memory_bytes_per_s: float  # device memory, in the optimizer's update
    kernel: str  # the attention kernel of the micro-batches
    shape_build_s: tuple[float, float]  # forward, backward: extra time of attention's first call with a shape
    fixed_s: float  # a training step without its micro-batches: median over steps, on rank 0; 0 if unknown
    network: Network | None = None  # None if the ranks were on one node

    @property
    def rings(self) -> list[tuple[Case, Timing]]:
        """The micro-batches with rings; empty if there are too few of them to fit the terms of rings."""
        found = [timed for timed in self.micro_batches if timed[0].ring]
        return found if len(found) >= _FEWEST_RINGS else []

    @property
    def plan_build_s(self) -> float | None:
        """Seconds in which cuDNN builds an execution plan, on average over both directions; None for other kernels."""
        return sum(self.shape_build_s) / 2 if self.kernel == "cudnn" else None

    def write(self, path: Path) -> None:
        """Write the measurements as JSON; `read` is the inverse."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def read(path: Path) -> Measured:
    """Read a file written by `Measured.write`."""
    found = read_object(path)
    timed = tuple(
        (Case(case["layers"], tuple(case["unsplit"]), tuple(case["ring"])), Timing(**timing))
        for case, timing in found["micro_batches"]
    )
    return Measured(
        **found
        | {name: _pairs(found[name]) for name in ("transfers", "updates")}
        | {"micro_batches": timed, "copies": Copies(**found["copies"])}
        | {"sharded": found["sharded"] and tuple(Timing(**timing) for timing in found["sharded"])}
        | {"shape_build_s": tuple(found["shape_build_s"]), "network": found["network"] and _network(found["network"])}
    )


def read_network(path: Path) -> Network:
    """Read the file that rank 0 of two nodes wrote."""
    return _network(read_object(path))


def _network(found: dict[str, Any]) -> Network:
    return Network(found["pairs"], _pairs(found["alone"]), _pairs(found["together"]))


def _pairs(rows: list[list[float]]) -> tuple[tuple[int, float], ...]:
    return tuple((int(size), float(value)) for size, value in rows)
