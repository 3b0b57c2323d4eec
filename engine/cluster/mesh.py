"""The device mesh: the axes hdp, tp, pp and ep, and the coordinates of each global rank.

No other module turns a global rank into coordinates or back. tp varies fastest, so that the ranks that split one layer
are neighbours in a node; pp varies slowest, because stages exchange least. Example: pp=2, hdp=3, tp=2.

```
              hdp 0   hdp 1   hdp 2
 stage 0       0 1     2 3     4 5        tp 0 and tp 1 side by side
 stage 1       6 7     8 9    10 11
```
A plan knows HDP ranks only: HDP rank 1 stands for the global ranks 2, 3, 8 and 9. Each ring runs once for each stage
and tp index, among the global ranks of one hdp group. ep splits the hdp axis into blocks of consecutive HDP ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from engine.config import schema
from engine.units import Ints

# A group on an axis: the ranks that differ only in this coordinate. `ep`: a block of ep ranks on the hdp axis.
# `model`: all global ranks of one HDP rank.
# `experts`: the ranks of an hdp group that store the same experts.
# `rings`: those of hdp, for transfers of K,V. `tied`: the first and the last stage; each other stage is alone.
Group = Literal["rings", "hdp", "tp", "pp", "model", "ep", "experts", "tied"]


@dataclass(frozen=True)
class Place:
    """Coordinates of one global rank; `pp` is its stage."""

    hdp: int
    tp: int = 0
    pp: int = 0


@dataclass(frozen=True)
class Mesh:
    """A mesh, by the sizes of its axes. Raises ValueError for a size below 1, or if ep does not divide hdp."""

    hdp: int
    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if min(self.hdp, self.tp, self.pp, self.ep) < 1 or self.hdp % self.ep:
            raise ValueError(f"not a mesh: {self}")

    @classmethod
    def of(cls, ranks: int, parallel: schema.Parallel) -> Mesh:
        """Build the mesh of `ranks` global ranks. Raises ValueError unless tp x pp divides them."""
        if ranks % (parallel.tp * parallel.pp):
            raise ValueError(f"{ranks} ranks do not divide into tp={parallel.tp} x pp={parallel.pp}")
        return cls(ranks // (parallel.tp * parallel.pp), parallel.tp, parallel.pp, parallel.ep)

    @property
    def ranks(self) -> int:
        """The number of global ranks."""
        return self.hdp * self.tp * self.pp

    def devices(self) -> Ints:
        """Return the global rank at each position of the mesh, [pp, hdp, tp]."""
        return np.arange(self.ranks, dtype=np.int64).reshape(self.pp, self.hdp, self.tp)

    def place(self, rank: int) -> Place:
        """Return the coordinates of a global rank. Raises IndexError for a rank outside 0..ranks-1."""
        if not 0 <= rank < self.ranks:
            raise IndexError(f"rank {rank} is outside a mesh of {self.ranks}")
        rest, tp = divmod(rank, self.tp)
        pp, hdp = divmod(rest, self.hdp)
        return Place(hdp, tp, pp)

    def rank(self, place: Place) -> int:
        """Return the global rank at some coordinates; the inverse of `Mesh.place`."""
        return (place.pp * self.hdp + place.hdp) * self.tp + place.tp

    def members(self, rank: int, group: Group) -> list[int]:
        """List the global ranks of the group that `rank` belongs to, in the order of its axis.

        The groups of one kind are a partition of all ranks.
        """
        here = self.place(rank)
        if group == "tp":
            places = [replace(here, tp=tp) for tp in range(self.tp)]
        elif group == "pp":
            places = [replace(here, pp=pp) for pp in range(self.pp)]
        elif group == "model":
            places = [Place(here.hdp, tp, pp) for pp in range(self.pp) for tp in range(self.tp)]
        elif group == "tied":
            ends = {0, self.pp - 1}
            places = [replace(here, pp=pp) for pp in (sorted(ends) if here.pp in ends else [here.pp])]
        else:
            first = here.hdp - here.hdp % self.ep
            of_group = {
                "rings": range(self.hdp),
                "hdp": range(self.hdp),
                "ep": range(first, first + self.ep),
                "experts": range(here.hdp % self.ep, self.hdp, self.ep),
            }
            places = [replace(here, hdp=hdp) for hdp in of_group[group]]
        return [self.rank(place) for place in places]
