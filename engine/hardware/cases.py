"""Which micro-batches are measured: well spread, so that each term of T(s) = a s^2 + b s + g shows somewhere."""

from __future__ import annotations

from engine.hardware.measured import Case

_SHORTEST = 32  # tokens
_PACKS = ((32, 4), (32, 16), (32, 64), (128, 4), (128, 8), (128, 32), (512, 2), (512, 8), (2048, 2), (2048, 4))
_OTHER = (32, 128, 512)  # tokens, of the model with another number of layers: what a layer costs however small
_MIXED = ((512, 128, 128), (2048, 512, 128, 128, 32, 32))  # a ring, and whole sequences in the same micro-batch


def cases(layers: int, other: int | None, ranks: int, longest: int) -> list[Case]:
    """Return the micro-batches of at most `longest` tokens of one sequence, or of all of a rank's.

    `other` is the second number of layers. Rings need two ranks.
    """
    found = [Case(layers, (length,)) for length in _ladder(longest)]
    found += [Case(layers, (length,) * count) for length, count in _PACKS if length * count <= longest]
    if other is not None:
        found += [Case(other, (length,)) for length in _OTHER if length <= longest]
    if ranks > 1:
        found += [Case(layers, shared=(length,)) for length in _ladder(longest)]
        found += [Case(layers, whole, (ring,)) for ring, *rest in _MIXED if sum(whole := tuple(rest)) + ring <= longest]
    return found


def _ladder(longest: int) -> list[int]:
    lengths = [_SHORTEST]
    while 2 * lengths[-1] <= longest:
        lengths.append(2 * lengths[-1])
    return lengths
