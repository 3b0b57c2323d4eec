"""The page of a memory estimate, and the figure of it that other pages show too."""

from __future__ import annotations

from engine.config.schema import Config
from engine.planner.estimate import Estimate
from engine.planner.settings import PlanSettings
from engine.report.memory_bars import memory_picture
from engine.report.page import Figure, Page, Table
from engine.report.words import memory_rows, memory_unit, short_tokens


def memory_page(config: Config, settings: PlanSettings, found: Estimate) -> Page:
    """Return the page of one estimate."""
    head = [
        ("model", config.model.name),
        ("ranks", f"{settings.ranks:,} of cluster={config.cluster.name}"),
        ("states", f"ZeRO-{config.zero.stage}, {config.dtype}"),
        ("recompute", config.recompute),
        ("context", f"{short_tokens(config.context)} tokens"),
        ("capacity of a rank", f"{short_tokens(config.capacity)} tokens"),
    ]
    table = Table("In numbers", memory_rows(found), ("", memory_unit(found.peak)[0], "share"))
    return Page(config.recipe, "a ByteScale memory estimate", head, [memory_figure(found)], [table])


def memory_figure(found: Estimate) -> Figure:
    """Return the picture of an estimate with its sentence."""
    away = (
        f", {found.load.offload / 1e6:.0%} of the middle layers' activations on the host" if found.load.offload else ""
    )
    caption = (
        f"A device at its fullest, with a micro-batch of {found.load.tokens:,} tokens{away}. Grey are allowances "
        "(docs/memory.md); the dashed line is what the device has."
    )
    return Figure.of("Memory of a device", caption, lambda size: memory_picture(found, size))
