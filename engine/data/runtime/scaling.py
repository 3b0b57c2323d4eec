"""How many loaders a run needs now: enough for all work to be done by the step that needs it. Pure functions.

```
 announced mixture, blocks that are packed  ->  needs: blocks of a source, by a step      needs
 blocks that loaders have packed            ->  seconds a block of each source, decaying  Estimates
 both, seconds a step, free cores           ->  loaders                                   loaders_wanted
```
The mixture of the coming steps is known, so a source whose weight will rise gets its loaders before. All seconds are
processor time: wall time grows with the number of loaders on a busy host, and would ask for more of them.

A window of a source must be packed before its first document is known, so all of its blocks have one deadline. With
work W_i (seconds) that is needed in t_i seconds, in the order of need, n loaders are enough if

    W_1 + ... + W_i  <=  n t_i  for all i

Note: [work until a deadline]. Two other sizes were tried in simulations and are worse. By length of the queue, a window
asks for 16 blocks at once and so for the most loaders, however late it is needed. By the steady rate of the mixture, a
window whose blocks become slow is late by most of its work, because all of it is needed before its first document.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import NamedTuple

from engine.data.mixture import SCALE

_USED = 0.7  # of the time of a loader, so that a late block or a wrong estimate does not delay a step
_HALF_LIFE = 1.0  # steps in which what was observed loses half of its weight against what is usual
_USUAL_BLOCKS = 0.25  # observed blocks that weigh as much as what is usual
_LAST_BLOCKS = 64  # whose median is usual: a source that is slow for some time does not change it
_PREDICTED_BLOCKS = 8  # that a prediction counts as
_UNKNOWN_S = 1.0  # for a block, before any was packed
_SOON = 0.5  # steps: the time for what should have been there before


class Need(NamedTuple):
    """Blocks of a source that must be packed before a step."""

    source: str
    blocks: float  # a block that is being packed counts as what is left of it
    steps: float  # until they are needed, from now on; not positive if they are late


@dataclass(frozen=True)
class SourceState:
    """How far a source is packed, and what is next."""

    left: float  # tokens of packed windows that no step has used
    window: float  # blocks of each next window that are still to be packed
    block_tokens: float  # tokens of a block
    packed_of_window: float = 0.0  # blocks of the next window that are packed, or the packed part of them


def needs(weights: Sequence[Mapping[str, int]], batch_tokens: int, sources: Mapping[str, SourceState]) -> list[Need]:
    """Return the windows that the next steps begin, in the order of need; at equal steps by the name of the source.

    `weights[i]` are those of step i from now on, as `weights_at` returns them; `sources` has all with a weight. Steps
    after the last one need nothing.
    """
    found = list[Need]()
    for name, state in sorted(sources.items()):
        left, packed = state.left, state.packed_of_window
        for step, of_step in enumerate(weights):
            before, left = left, left - of_step.get(name, 0) / SCALE * batch_tokens
            used = before - left
            while left < 0:  # the step takes more tokens than are packed: it begins the next window
                share = max(0.0, used + left) / used
                found.append(Need(name, state.window - packed, step + share))
                left, packed = left + state.window * state.block_tokens, 0.0
    return sorted((need for need in found if need.blocks > 0), key=lambda need: (need.steps, need.source))


def loaders_wanted(
    needed: Iterable[Need], seconds: Mapping[str, float], step_s: float, free_cores: int, least: int = 1
) -> int:
    """Return how many loaders pack all blocks in time, at least `least`, and at most `free_cores` if that is more.

    `needed` are in the order of need, `seconds` is the processor time of a block of each source, as far as it is known,
    and `step_s` the time of a step. More loaders than blocks are never wanted.
    """
    unknown = sum(seconds.values()) / len(seconds) if seconds else _UNKNOWN_S
    work = wanted = blocks = 0.0
    for need in needed:
        work += need.blocks * seconds.get(need.source, unknown)
        blocks += ceil(need.blocks)
        time = max(need.steps, _SOON) * step_s * _USED
        wanted = max(wanted, min(work / time, blocks))
    return max(least, min(ceil(wanted), free_cores))


class Estimates:
    """Processor seconds of a block of each source: those of its last blocks, which decay to what is usual for it.

    They decay in every step, also if no block of the source is packed: a source that was slow may need its next block
    much later, and would keep its loaders until then.
    """

    def __init__(self, predicted: Mapping[str, float] | None = None) -> None:
        """Take the seconds of a block of some sources, as `profile-data` predicts them."""
        self._last = {
            name: deque([seconds] * _PREDICTED_BLOCKS, _LAST_BLOCKS) for name, seconds in (predicted or {}).items()
        }
        self._observed = dict[str, tuple[float, float]]()  # sum of seconds, and number of blocks, both decayed

    def packed(self, source: str, seconds: float) -> None:
        """Add a block that was packed."""
        total, blocks = self._observed.get(source, (0.0, 0.0))
        self._observed[source] = total + seconds, blocks + 1
        self._last.setdefault(source, deque(maxlen=_LAST_BLOCKS)).append(seconds)

    def step(self, steps: float = 1.0) -> None:
        """Let the time of some steps pass."""
        factor = 0.5 ** (steps / _HALF_LIFE)
        self._observed = {name: (total * factor, blocks * factor) for name, (total, blocks) in self._observed.items()}

    def seconds(self, running: Iterable[tuple[str, float]] = ()) -> dict[str, float]:
        """Return the estimate of each source. A block that is still `running`, with its seconds so far, counts too.

        A source that has become slow is seen as soon as a block of it takes longer than expected, not when it ends.
        """
        found = dict[str, float]()
        for name, last in self._last.items():
            total, blocks = self._observed.get(name, (0.0, 0.0))
            found[name] = (total + _USUAL_BLOCKS * median(last)) / (blocks + _USUAL_BLOCKS)
        for name, so_far in running:
            found[name] = max(found.get(name, 0.0), so_far)
        return found
