"""The K,V of earlier slices of sequences on one rank, which later slices attend to, and the gradients that they get.

A long sequence may run in slices (planner/plan/step_plan.py), each with a separate autograd graph. The forward pass of
a slice puts its K,V here. The backward pass of a later slice adds gradients to them, and that of the slice itself takes
these, and removes the entry:

```
 forward    slice 0 puts K,V | slice 1 attends to those of 0, puts its own | slice 2 attends to those of 0 and 1
 backward   slice 2 adds gradients of 0 and 1 | slice 1 takes its own, adds those of 0 | slice 0 takes its own
```
Letters: S tokens of a slice on this rank, G key and value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.dtypes import wider
from engine.models.common.attention import SliceTotals


@dataclass(eq=False)
class _Kept:
    """K,V of one slice in one layer, [2,S,G,D], and the sum of the gradients of later slices, in the wider dtype."""

    kv: Tensor
    dkv: Tensor | None = None


class Prefixes:
    """The K,V of all sequences of a step that run in slices, on one device.

    Methods raise RuntimeError if the passes of a sequence do not run in the order above. Otherwise queries would attend
    to some of their keys only, and nothing would show it.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], list[_Kept]] = {}  # by sequence and layer: slice by slice
        self._totals: dict[int, SliceTotals] = {}  # by sequence

    def __len__(self) -> int:
        """The number of entries, of sequences and their layers; 0 after the last backward pass of a step."""
        return len(self._kept) + len(self._totals)

    def clear(self) -> None:
        """Remove everything, as at the start of a step: after an exception something may be left of the last one."""
        self._kept.clear()
        self._totals.clear()

    def totals(self, sequence: int) -> SliceTotals:
        """Return what all slices of a sequence share for the loss that balances experts."""
        return self._totals.setdefault(sequence, SliceTotals())

    def put(self, sequence: int, layer: int, number: int, k: Tensor, v: Tensor) -> None:
        """Keep a copy of the K,V [S,G,D] of slice `number`. Recomputing a layer puts the same ones again."""
        slices = self._kept.setdefault((sequence, layer), [])
        _check(number <= len(slices), sequence, number)
        if number == len(slices):
            slices.append(_Kept(torch.stack((k, v))))

    def earlier(self, sequence: int, layer: int, number: int) -> list[Tensor]:
        """Return the K,V [2,S,G,D] of each slice before slice `number`."""
        slices = self._kept.get((sequence, layer), [])[:number]
        _check(len(slices) == number, sequence, number)
        return [one.kv for one in slices]

    def add(self, sequence: int, layer: int, gradients: Sequence[Tensor]) -> None:
        """Add the gradients [2,S,G,D] of the K,V of the first slices, one tensor for each."""
        slices = self._kept.get((sequence, layer), [])
        _check(len(slices) >= len(gradients), sequence, len(gradients))
        for one, gradient in zip(slices, gradients, strict=False):
            if one.dkv is None:
                one.dkv = gradient.to(wider(gradient.dtype), copy=True)
            else:
                one.dkv += gradient

    def take(self, sequence: int, layer: int, number: int) -> Tensor | None:
        """Remove slice `number`, the last one that is kept, and return the gradients [2,S,G,D] of its K,V, if any."""
        slices = self._kept.get((sequence, layer), [])
        _check(number == len(slices) - 1, sequence, number)
        kept = slices.pop()
        if not slices:
            del self._kept[sequence, layer]
            self._totals.pop(sequence, None)  # complete since the last forward pass; autograd graphs refer to them
        return kept.dkv

    def drop(self, sequence: int, layer: int) -> None:
        """Remove all slices of a sequence in a layer, if any, when no backward pass will follow."""
        self._kept.pop((sequence, layer), None)


def _check(in_order: bool, sequence: int, number: int) -> None:
    if not in_order:
        raise RuntimeError(f"slice {number} of sequence {sequence} runs in the wrong order")
