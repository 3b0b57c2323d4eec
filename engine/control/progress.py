"""Where a rank is in its step. The agent passes it on to the launcher, which notices when no rank gets on."""

from __future__ import annotations

from contextlib import suppress

from engine.control.link import Link

PHASES = ("start", "plan", "forward", "backward", "update", "log", "validate", "save")  # in their order in a step


class _Place:
    link: Link | None = None
    step = 0


_place = _Place()


def report_to(link: Link | None) -> None:
    """Send all later reports of this process to an agent, or nowhere."""
    _place.link = link


def report(phase: str, part: int = 0, step: int | None = None) -> None:
    """Say that this rank begins a phase of its step, for example micro-batch 3 of `forward`; a `step` begins with it.

    It takes microseconds. If the agent is gone, the thread that listens to it notices.
    """
    if step is not None:
        _place.step = step
    if _place.link is not None:
        with suppress(OSError):
            _place.link.send(at=[_place.step, phase, part])
