"""The page of a memory estimate, and its figure: a bar for each item, next to the memory of the device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from matplotlib.axes import Axes

from engine.fit.estimate import Estimate
from engine.job import Job
from engine.report import headline
from engine.report.charts import ROW, name_rows, row_marks, write_ends
from engine.report.page import Figure, Page, Table
from engine.report.svg import FIRST, INK, QUIET, SECOND, WIDE, AltText, Mark, Size, draw
from engine.report.words import Pair, hdp_ranks, memory_parts, memory_rows, memory_unit, short_tokens


def memory_page(job: Job, found: Estimate, fitting: Sequence[Pair] = (), refused: str | None = None) -> Page:
    """Build the page of an estimate. `fitting` are sizes that fit, and `refused` the reason if the job does not fit."""
    config = job.config
    ranks = hdp_ranks(job.settings.ranks, config.parallel.tp, config.parallel.pp)
    head = [
        ("model", config.model.name),
        ("ranks", f"{ranks}, cluster={config.cluster.name}"),
        ("states", f"ZeRO-{config.zero.stage}, {config.dtype}"),
        ("recompute", config.recompute),
        ("context", f"{short_tokens(config.context)} tokens"),
        ("capacity of a rank", f"{short_tokens(config.capacity)} tokens"),
    ]
    table = Table("Memory by item", memory_rows(found), ("", memory_unit(found.peak)[0], "of total"))
    tables = [table]
    if fitting:
        note = "Values that any command accepts. The other keys are unchanged."
        tables.append(Table("What fits", fitting, note=note, text=True))
    figures = [memory_figure(found)]
    return Page(config.recipe, "a ByteScale memory estimate", headline.of_memory(found), head, figures, tables, refused)


def memory_figure(found: Estimate) -> Figure:
    """Draw an estimate as a figure with a caption."""
    ratio, tokens = found.load.offload / 1e6, found.load.tokens
    offload = f" at an offload ratio of {ratio:.0%}" if ratio else ""
    caption = (
        f"Peak memory of a device with a micro-batch of {tokens:,} tokens{offload}. The two grey bars, for the CUDA "
        "context or process and for fragmentation, are allowances (docs/memory.md). The dashed line is the "
        "memory of the device."
    )
    return Figure.of("Memory of a device", caption, lambda size: memory_picture(found, size))


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
        name_rows(axes, rows, list(parts))
        axes.set_xlabel(f"{name} per device")
        return row_marks(
            axes,
            rows,
            [f"{part}: {used / unit:,.2f} {name}, {used / found.device_total:.1%}" for part, used in parts.items()],
        )

    verdict = "it fits." if found.fits else "it does not fit."
    caption = f"{found.peak / unit:,.1f} of {total:,.1f} {name}: {verdict}"
    return draw(AltText("memory", "Memory of a device by item", caption), size, ROW * len(parts) + 80, paint)
