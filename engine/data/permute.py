"""A random order of any number of items that is computed item by item, without a table.

A Feistel network with a keyed hash permutes 0 .. 4^k - 1, and results that are not below the number of items are
permuted again until one is ("cycle walking"; Black and Rogaway, Ciphers with arbitrary finite domains, 2002).
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from engine.units import Ints

Words = NDArray[np.uint64]
_ROUNDS = 10
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of splitmix64 (Steele et al. 2014)


@dataclass(frozen=True)
class Permutation:
    """A random order of 0 .. count - 1. It depends on `count` and the text `key` only, on every machine."""

    count: int
    key: str

    def __call__(self, positions: Ints) -> Ints:
        """Return the items at some positions of the order: int64 [n]. Positions are from 0 to count - 1."""
        half = max(1, ((self.count - 1).bit_length() + 1) // 2)  # bits of each half
        digest = blake2b(f"{self.key} {self.count}".encode(), digest_size=4 * _ROUNDS).digest()
        keys = np.frombuffer(digest, dtype="<u4").astype(np.uint64)
        items = self._once(positions.astype(np.uint64), half, keys)
        while (outside := items >= np.uint64(self.count)).any():
            items[outside] = self._once(items[outside], half, keys)
        return items.astype(np.int64)

    @staticmethod
    def _once(items: Words, half: int, keys: Words) -> Words:
        """Permute 0 .. 4^half - 1 once."""
        bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
        left, right = items >> bits, items & mask
        for key in keys:
            mixed = (right + key) * np.uint64(_MIX[0])
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(_MIX[1])
            left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
        found: Words = left << bits | right
        return found
