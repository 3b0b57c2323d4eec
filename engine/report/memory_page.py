"""The page of a memory estimate, and the figure of an estimate for other pages."""

from __future__ import annotations

from collections.abc import Sequence

from engine.config.schema import Config
from engine.fit.estimate import Estimate
from engine.planner.settings import PlanSettings
from engine.report import headline
from engine.report.memory_bars import memory_picture
from engine.report.page import Figure, Page, Table
from engine.report.words import Pair, hdp_ranks, memory_rows, memory_unit, short_tokens


def memory_page(
    config: Config, settings: PlanSettings, found: Estimate, fitting: Sequence[Pair] = (), refused: str | None = None
) -> Page:
    """Build the page of an estimate. `fitting` is what would fit, and `refused` why the config does not."""
    ranks = hdp_ranks(settings.ranks, config.parallel.tp, config.parallel.pp)
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
        note = "Values to set for any command. The others stay as they are."
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
