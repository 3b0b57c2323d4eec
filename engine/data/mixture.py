"""The mixture of sources: which source the next document is taken from, so that sources get their shares of tokens.

All arithmetic is in integers, so the order is the same on every machine. Weights are in 1/SCALE and their sum is SCALE.
The debt of a source is the tokens that it should have had so far minus those that it had, also in 1/SCALE of a token;
the sum of all debts is 0. For weights 3/4 and 1/4:

    document of    a, 8    b, 4    a, 8    b, 4    a, 4
    debt of a   0    -2      +1      -1      +2      +1
    debt of b   0    +2      -1      +1      -2      -1

Note: [how far sources are from their shares]. Let M be the longest document so far, of any source. A source is due
when its debt would reach M, if only others were served. `Draws` serves, of the sources that are not ahead
(debt >= 0), the one that is due first. The length of its next document need not be known. With constant weights:

- ahead: debt >= -(the source's own longest document), because a source is served only at a debt >= 0;
- behind: debt <= M. Serving the largest debt first would exceed this: up to 1.65 M with five sources.

The second holds because of an invariant. For every time E (in tokens of the run), from the present time t on, the
sources whose debt would be above M at E need no more tokens than there are:

    sum of (debt + weight * (E - t)) over S(E)  <=  E - t + M,     S(E) = {debt + weight * (E - t) > M}

E = t gives the bound. The invariant holds at the start, and a document of L <= M tokens, which makes the right side
smaller by L, keeps it. If its source is in S(E), the left side is smaller by L too, or by more than M if the source
leaves S(E). If it is not, all sources in S(E) are due earlier, so they are ahead: their debts are negative, and the
left side is at most E - t. A document of L > M tokens makes L the new M. The right side is then E - t, with the t
before the document, and by the same three cases the left side is at most that.

After a change of weights the bound on ahead still holds. The one on behind can be exceeded, which only knowledge of
the future weights and lengths could prevent; `docs/decisions.md` has figures. The method is EEVDF (Stoica and
Abdel-Wahab, 1995) with a common bound in place of the length of each next document.

Note: [64 bits suffice]. Whatever the weights, and whichever sources are dropped, the debts of N sources are between
-N * M and N * M tokens. A source falls behind 0 only by a document of its own, which it gets at a debt >= 0, and a
dropped source passes on what is left of that. So the sum of the debts below 0 is at least -N * M, and that of the
others is as much above 0. Documents have at most 2^41 / N tokens (`longest_document`), for which no debt exceeds 2^61;
`Draws` adds less than 2^62 to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from engine.config import schema
from engine.config.sources import source_configs
from engine.units import Ints

SCALE = 1 << 20  # the sum of all weights
LengthRange = tuple[int, int]  # the least and the most inputs of a document
ANY: LengthRange = (1, (1 << 62) - 1)
_BITS = 64  # of a share of a cosine schedule
_PI, _PI_BITS = 0x3243F6A8885A308D313198A2E03707344A409382, 156  # pi in 1/2^156


@dataclass(frozen=True)
class Segment:
    """Weights from a step, or from a number of tokens of the run, on."""

    start: int  # the first segment starts at 0
    weights: Mapping[str, int]  # as `scaled` returns them; every segment names the same sources
    unit: Literal["step", "tokens"] = "step"  # of `start`, the same for all segments
    # How weights move from the previous segment's, which they leave where it starts
    schedule: schema.Schedule = "constant"
    lengths: LengthRange = ANY  # of the documents that are taken


def segments_of(data: schema.Data) -> list[Segment]:
    """Return the segments of `data.mix`; without it, one segment of the only source, which has all the weight.

    `engine/config/checks.py` has checked `data.mix`.
    """
    names = list(source_configs(data))
    unit: Literal["step", "tokens"] = "tokens" if any(one.tokens for one in data.mix) else "step"
    found = []
    for one in data.mix or (schema.Segment(weights=dict.fromkeys(names, 1.0)),):
        weights = scaled({name: one.weights.get(name, 0) for name in names})
        found.append(Segment(one.start, weights, unit, one.schedule, one.lengths or ANY))
    return found


def scaled(weights: Mapping[str, float | Fraction]) -> dict[str, int]:
    """Convert numbers >= 0, not all 0, of at most 1,024 sources into integers with the sum SCALE.

    Rounds by the largest remainder (ties: the first name); a weight above 0 stays at least 1.
    """
    exact = {name: Fraction(weights[name]) for name in sorted(weights)}
    shares = split(SCALE, exact)
    # A share of 0 becomes 1 at the expense of the largest, which is at least 1,024.
    raised = [name for name in exact if exact[name] and not shares[name]]
    shares[max(exact, key=lambda name: exact[name])] -= len(raised)
    shares.update(dict.fromkeys(raised, 1))
    return {name: shares[name] for name in weights}


def split(amount: int, weights: Mapping[str, int | Fraction]) -> dict[str, int]:
    """Divide an integer in proportion to weights >= 0, not all 0, exactly: by the largest remainder, then the name."""
    total = sum(weights.values())
    names = sorted(weights)
    parts = {name: divmod(amount * weights[name], total) for name in names}
    shares = {name: int(whole) for name, (whole, _) in parts.items()}
    # Remainders are multiples of 1/total, and their sum is less than one for each name.
    for name in sorted(names, key=lambda name: -parts[name][1])[: amount - sum(shares.values())]:
        shares[name] += 1
    return shares


def longest_document(sources: int) -> int:
    """Return how many tokens a document may have at most, see the note on 64 bits: 2^31 with 1,024 sources."""
    return (1 << 41) // sources


def segment_at(segments: Sequence[Segment], step: int, tokens: int) -> int:
    """Return the index of the segment of a step, before which the run had `tokens` tokens."""
    at = step if segments[0].unit == "step" else tokens
    return max(number for number, segment in enumerate(segments) if segment.start <= at)


def weights_at(segments: Sequence[Segment], step: int, tokens: int) -> dict[str, int]:
    """Return the weights of a step, before which the run had `tokens` tokens. They do not change during a step."""
    at = step if segments[0].unit == "step" else tokens
    index = segment_at(segments, step, tokens)
    last = segments[index]
    if index + 1 == len(segments) or segments[index + 1].schedule == "constant":
        return dict(last.weights)
    following = segments[index + 1]
    moved = Fraction(at - last.start, following.start - last.start)
    if following.schedule == "cosine":
        moved = half_cosine(moved)
    return scaled(
        {name: last.weights[name] + (following.weights[name] - last.weights[name]) * moved for name in last.weights}
    )


def half_cosine(part: Fraction) -> Fraction:
    """Return (1 - cos(pi * part)) / 2 for a part in 0 .. 1, as a multiple of 1/2^64.

    It is computed with integers alone, so it is the same on every machine. The error is below 2^-64: the terms of the
    series of sin(pi * part / 2), whose angle is at most pi / 4, are rounded down to 1/2^156 and end below that.
    """
    if part > Fraction(1, 2):  # so that both halves of the curve are the same
        return 1 - half_cosine(1 - part)
    angle = _PI * part.numerator // (2 * part.denominator)
    term, power, sine = angle, 1, 0
    while term:
        sine += term if power % 4 == 1 else -term
        term = term * angle * angle // ((power + 1) * (power + 2) << 2 * _PI_BITS)
        power += 2
    rest = 2 * _PI_BITS - _BITS
    return Fraction((sine * sine + (1 << rest - 1)) >> rest, 1 << _BITS)


class Mixer:
    """Keeps the debts of sources, by which `Draws` chooses them. `state` is plain data, and does not contain weights.

    Set `weights` before each step. A run may continue with other weights, and with sources that it did not have: they
    begin with a debt of 0.
    """

    names: list[str]  # of all sources, [N], sorted
    taken: Ints  # [N] tokens so far
    debts: Ints  # [N] in 1/SCALE of a token
    shares: Ints  # [N] weights in use; -1 for a source that cannot be chosen

    def __init__(self, names: Iterable[str], state: Mapping[str, Any] | None = None) -> None:
        """Begin with debts of 0, or continue from a state. Raises ValueError if `names` lacks one of its sources."""
        state = state or {"sources": {}, "dropped": [], "longest": 0}
        self.names = sorted(names)
        unknown = sorted({*state["sources"]} - {*self.names})
        if unknown:
            raise ValueError(f"the state has sources that are not in the mixture: {', '.join(unknown)}")
        saved = np.array([state["sources"].get(name, (0, 0)) for name in self.names], dtype=np.int64).reshape(-1, 2)
        self.taken, self.debts = saved.T.copy()
        self.longest = int(state["longest"])  # tokens of the longest document so far
        self.dropped = set(state["dropped"])
        self.weights = dict.fromkeys(self.names, 0)

    @property
    def state(self) -> dict[str, Any]:
        """All that `Mixer(names, state)` needs to continue, for JSON: about 40 bytes a source and its name."""
        saved = np.stack([self.taken, self.debts], axis=1).tolist()
        sources = dict(zip(self.names, saved, strict=True))
        return {"sources": sources, "dropped": sorted(self.dropped), "longest": self.longest}

    @property
    def weights(self) -> dict[str, int]:
        """The weights in use. Dropped sources have none; the others' have the sum SCALE, or none has one."""
        return self._weights

    @weights.setter
    def weights(self, weights: Mapping[str, int]) -> None:
        """Set the weights of all sources, as `weights_at` returns them; those of dropped sources go to the others."""
        self._given = weights
        left = {name: weights[name] for name in self.names if name not in self.dropped}
        self._weights = scaled(left) if any(left.values()) else {}
        self.shares = np.array([self._weights.get(name, -1) for name in self.names], dtype=np.int64)

    def forget(self, name: str) -> None:
        """Remove a source that the config no longer has, as `drop`. If it comes back, it begins with a debt of 0."""
        self.drop(name)
        self.dropped.remove(name)
        number = self.names.index(name)
        self.names.remove(name)
        self.taken, self.debts, self.shares = (
            np.delete(column, number) for column in (self.taken, self.debts, self.shares)
        )

    def drop(self, name: str) -> None:
        """Remove a source for the rest of the run. Its debt goes to the others in proportion to their weights."""
        self.dropped.add(name)
        self.weights = self._given
        number = self.names.index(name)
        debt, self.debts[number] = int(self.debts[number]), 0
        left = {other: self._given[other] for other in self.names if other not in self.dropped}
        if not any(left.values()):  # of a segment in which the others have no weight
            left = dict.fromkeys(left, 1)
        parts = split(debt, left) if left else {}
        self.debts += np.array([parts.get(other, 0) for other in self.names], dtype=np.int64)
