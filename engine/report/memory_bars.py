"""A chart of the memory items of a device, one bar per item, next to the device's memory: numbers in, SVG text out."""

from __future__ import annotations

from itertools import accumulate

from matplotlib.axes import Axes

from engine.fit.estimate import Estimate
from engine.report.charts import ROW, write_ends
from engine.report.svg import FIRST, INK, QUIET, SECOND, WIDE, AltText, Mark, Size, draw
from engine.report.words import memory_parts, memory_unit


def memory_picture(found: Estimate, size: Size = WIDE) -> str:
    """Draw an estimate's items as bars; each bar begins where the one above it ends. Returns an `<svg>` element."""
    parts, (name, unit) = memory_parts(found), memory_unit(found.peak)
    sizes = [part / unit for part in parts.values()]
    ends = list(accumulate(sizes))
    rows, total = range(len(parts)), found.device_total / unit

    def paint(axes: Axes) -> list[Mark]:
        colors = (len(parts) - 2) * [FIRST] + 2 * [QUIET]  # the last two are allowances
        axes.barh(rows, sizes, left=[0, *ends[:-1]], height=0.7, color=colors)
        write_ends(axes, rows, ends, [f"{part:,.1f}" for part in sizes], size)
        axes.axvline(total, color=INK if found.fits else SECOND, linestyle="--", linewidth=1.4)
        axes.set_xlim(0, max(axes.get_xlim()[1], 1.05 * total))
        axes.set_yticks(rows, list(parts))
        axes.set_ylim(len(parts) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(f"{name} per device")
        return [
            Mark(
                0,
                axes.get_xlim()[1],
                row - 0.5,
                row + 0.5,
                f"{part}: {used / unit:,.2f} {name}, {used / found.device_total:.1%}",
            )
            for row, (part, used) in enumerate(parts.items())
        ]

    verdict = "it fits." if found.fits else "it does not fit."
    caption = f"{found.peak / unit:,.1f} of {total:,.1f} {name}: {verdict}"
    return draw(AltText("memory", "Memory of a device by item", caption), size, ROW * len(parts) + 80, paint)
