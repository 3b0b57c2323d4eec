"""Where a rank is in its step. The agent passes it on to the launcher, which notices when no rank gets on."""

from __future__ import annotations

from contextlib import suppress

from engine.control.link import Link

# In their order in a step. `data` waits for the slices of the micro-batch.
PHASES = ("start", "plan", "data", "forward", "backward", "update", "log", "validate", "save")
OF_MICRO_BATCHES = ("data", "forward", "backward")  # repeated for each micro-batch


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
