"""Where a rank is in its step. The agent passes it on to the launcher, which detects when no rank makes progress."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from engine.control.link import Link
from engine.control.protocol import At, Message, Pace, Planned

# In their order in a step. `verify` hashes a checkpoint, `data` waits for the slices of the micro-batch, `reduce` sums
# gradients, and `update` is the optimizer's.
PHASES = ("start", "verify", "plan", "data", "forward", "backward", "reduce", "update", "log", "validate", "save")
OF_PASSES = ("data", "forward", "backward")  # repeated: a pass is forward or backward, of one micro-batch
# What only chaos wants to know. Of a checkpoint, in the background: a rank has written the first bytes of its part; the
# checkpoint gets its name. Of a pipeline: a pass is done, and the transfers to and from other stages begin.
MOMENTS = ("write", "rename", "transfer")


class _Place:
    link: Link | None = None
    chaos: Callable[[int, str], None] | None = None  # gets the step and the phase
    step = 0


_place = _Place()


def report_to(link: Link | None) -> None:
    """Send all later reports of this process to an agent, or nowhere."""
    _place.link = link


def allow_chaos(reach: Callable[[int, str], None] | None) -> None:
    """Call `reach` with the step and the phase, or one of MOMENTS, at all later reports; None for no more."""
    _place.chaos = reach


def report(phase: str, part: int = 0, step: int | None = None) -> None:
    """Say that this rank begins a phase of its step, for example `forward` as its pass 3; a `step` begins with it.

    `part` is the number of the pass among those of this rank in this step, by which the rank that is furthest behind is
    found; numbers of the plan count over all ranks, and would not tell.

    It takes microseconds. If the agent is gone, the thread that listens to it notices.
    """
    if step is not None:
        _place.step = step
    _send(At(_place.step, phase, part))
    if _place.chaos is not None:
        _place.chaos(_place.step, phase)


def tell_planned(seconds: float) -> None:
    """Say how long the plan of this step takes on the planned hardware. The step is measured from here to `log`."""
    _send(Planned(seconds))


def tell_pace(pace: float) -> None:
    """Say how many times longer than planned the work of this rank takes."""
    _send(Pace(pace))


def _send(message: Message) -> None:
    if _place.link is not None:
        with suppress(OSError):
            _place.link.send(message)


def reach(moment: str) -> None:
    """Say that this rank is at one of MOMENTS, which only chaos wants to know. Any thread may call it."""
    if _place.chaos is not None:
        _place.chaos(_place.step, moment)
