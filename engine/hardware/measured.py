"""What is measured, as plain data: the ranks write it (torch), the command fits it (numpy).

All times are seconds: the lower quartile over repetitions, the mean over ranks. All ranks measure the same at the same
time, as in training, where the neighbours' work shares caches and memory.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.config.units import counted

RESULT = "measured.json"  # in the folder of the ranks


@dataclass(frozen=True)
class Case:
    """A micro-batch of a model of so many layers: whole sequences, and sequences on a ring of all ranks, by length."""

    layers: int
    whole: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Return the case as people say it: `2 layers, 4 x 128, ring of 2048`."""
        counts = [f"{self.whole.count(length)} x {length}" for length in sorted(set(self.whole))]
        rings = [f"ring of {length}" for length in self.shared]
        return ", ".join([counted(self.layers, "layer"), *counts, *rings])


@dataclass(frozen=True)
class Timing:
    """A forward and a backward pass; `spread` is how far the median of both together lies above the best."""

    forward_s: float
    backward_s: float
    spread: float

    @property
    def total_s(self) -> float:
        """Return both together."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Measured:
    """All that the ranks have measured."""

    device: str
    ranks: int
    layers: int  # of the model that was trained
    half_tokens: float
    product_flops_per_s: float  # of the fastest product of square matrices
    micro_batches: tuple[tuple[Case, Timing], ...]
    transfers: tuple[tuple[int, float], ...]  # (bytes each way, s); none on one rank
    overlap: float  # of a transfer and compute, as in the calibration; 0 on one rank
    updates: tuple[tuple[int, float], ...]  # (parameters, s) of the optimizer's step of models of two sizes
    copy_bytes_per_s: float
    memory_bytes_per_s: float
    saved: tuple[tuple[int, float], ...]  # (tokens, bytes) that a forward pass keeps
    fixed_s: float  # a real step of the trainer, without its micro-batches

    def write(self, path: Path) -> None:
        """Write the file that `read` reads."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def read(path: Path) -> Measured:
    """Return what `write` wrote."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    cases = [(_case(case), Timing(**timing)) for case, timing in found["micro_batches"]]
    pairs = {
        name: tuple((int(size), float(value)) for size, value in found[name])
        for name in ("transfers", "updates", "saved")
    }
    return Measured(**found | pairs | {"micro_batches": tuple(cases)})


def _case(found: dict[str, Any]) -> Case:
    return Case(found["layers"], tuple(found["whole"]), tuple(found["shared"]))
