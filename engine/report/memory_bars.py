"""What fills a device, a bar an item, against what the device has. Numbers in, SVG text out."""

from __future__ import annotations

from matplotlib.axes import Axes

from engine.planner.estimate import Estimate
from engine.report.bars import ROW, write_ends
from engine.report.svg import FIRST, INK, QUIET, SECOND, WIDE, Size, Words, draw
from engine.report.words import memory_parts, memory_unit


def memory_picture(found: Estimate, size: Size = WIDE) -> str:
    """Return the items of a device from the top down, each beginning where the one above it ends."""
    parts, (name, unit) = memory_parts(found), memory_unit(found.peak)
    starts = [sum(list(parts.values())[:row]) / unit for row in range(len(parts))]
    sizes = [part / unit for part in parts.values()]
    rows, total = range(len(parts)), found.device_total / unit

    def paint(axes: Axes) -> None:
        beside = (len(parts) - 2) * [FIRST] + 2 * [QUIET]  # the last two are allowances
        axes.barh(rows, sizes, left=starts, height=0.7, color=beside)
        ends = [start + part for start, part in zip(starts, sizes, strict=True)]
        write_ends(axes, rows, ends, [f"{part:,.1f}" for part in sizes], size)
        axes.axvline(total, color=INK if found.fits else SECOND, linestyle="--", linewidth=1.4)
        axes.set_xlim(0, max(axes.get_xlim()[1], 1.05 * total))
        axes.set_yticks(rows, list(parts))
        axes.set_ylim(len(parts) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(f"{name} of a device")

    told = f"{found.peak / unit:,.1f} of {total:,.1f} {name}: " + ("it fits." if found.fits else "it does not fit.")
    return draw(Words("memory", "What fills a device", told), size, ROW * len(parts) + 80, paint)
