"""A picture of a plan as a file: its timeline below that of a fixed mesh, for the same step on the same time scale."""

from __future__ import annotations

import re
from html import escape

import numpy as np

from engine.config.schema import BASELINE
from engine.config.units import counted
from engine.errors import MemoryFitError
from engine.planner.make import plan_step
from engine.planner.plan.loads import unsplit_share
from engine.planner.plan.step_plan import StepPlan
from engine.planner.settings import PlanSettings
from engine.report.boxes import Boxes, degree_groups, simulated
from engine.report.svg import Size, palette
from engine.report.timeline import timeline_picture
from engine.report.words import short_seconds

_SIZE = Size("picture", 820, 14, 0)  # image files have no pointers
_ROWS = 16  # ranks that are shown of each plan
_HEIGHT = 210.0  # pixels of all rows of a timeline
_MARGIN, _LINE = 16, 26


def plan_picture(plan: StepPlan, settings: PlanSettings) -> str:
    """Draw a plan as an SVG file in light and dark colours.

    The fixed mesh is left out if it is the plan, or if it does not fit.
    """
    shown = [(plan, simulated(plan, settings, _ROWS))]
    if plan.planner != BASELINE:
        fixed = settings.by(BASELINE)
        try:
            mesh = plan_step(plan.sequence_lengths, fixed)
            shown.insert(0, (mesh, simulated(mesh, fixed, _ROWS)))
        except MemoryFitError:
            pass
    # Both steps have the same time scale and the same colours, so that they can be compared.
    groups = degree_groups(np.concatenate([found.degree for _, found in shown]))
    until = max(found.end_s for _, found in shown)

    # An SVG file may contain others: each timeline is placed below the last one, at its own height.
    head = f"A simulated step on {counted(plan.ranks, 'rank')}"
    if len(shown) > 1:
        ratio = shown[0][1].end_s / shown[1][1].end_s
        head += f": {plan.planner} is {ratio:.1f} times as fast as a mesh fixed at these settings"
    parts, top = [_text(head, _MARGIN + 18, 18, bold=True)], _MARGIN + 18
    for made, found in shown:
        top += _LINE + 6
        parts.append(_text(_caption(made, found), top, 14))
        svg = timeline_picture(found, _SIZE, key=made.planner, until_s=until, groups=groups, height=_HEIGHT)
        match = re.search(r'viewBox="0 0 \S+ (\S+)"', svg)
        assert match is not None, "every picture has a view box"
        place = f'x="{_MARGIN}" y="{top + 8}" width="{_SIZE.width}" height="{match[1]}"'
        parts.append(svg.replace("<svg ", f"<svg {place} ", 1))
        top += 8 + round(float(match[1]))
    width, height = _SIZE.width + 2 * _MARGIN, top + _MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">\n'
        f"<style>{palette()} svg {{ color: var(--ink); }}</style>\n"
        f'<rect width="{width}" height="{height}" rx="8" style="fill: var(--paper)"/>\n{"".join(parts)}</svg>\n'
    )


def _caption(plan: StepPlan, found: Boxes) -> str:
    """Describe how the planner distributes the sequences of the step, and the time of the step."""
    largest, whole = int(plan.degrees.max()), unsplit_share(plan)
    if largest == 1:
        what = "each sequence on one rank"
    elif whole == 0 and int(plan.degrees.min()) == largest:
        what = f"each sequence is split over {largest:,} ranks"
    else:
        what = f"{whole:.0%} of the tokens in unsplit sequences, the others in rings of up to {largest:,} ranks"
    return f"{plan.planner}: {what}; {short_seconds(found.end_s)}"


def _text(text: str, y: int, size: int, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    font = 'font-family="system-ui, Segoe UI, DejaVu Sans, sans-serif"'
    return f'<text x="{_MARGIN}" y="{y}" fill="currentColor" {font} font-size="{size}"{weight}>{escape(text)}</text>\n'
