"""`bytescale profile-hardware`: measures this machine and writes the calibration that the cost model reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from bytescale_cli import output
from bytescale_cli.options import Debug, Json, Overrides, writable

if TYPE_CHECKING:
    from engine.hardware.profile import Profile

_GOOD = 0.15  # relative; above it the calibration, or the machine while it was measured, is worth a warning


def profile_hardware(
    overrides: Overrides = None,
    out: Annotated[str, typer.Option(metavar="FILE", help="Where the calibration goes.")] = "calibration.json",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure this machine and write its calibration. For cluster.calibration=FILE; takes about a minute."""
    from engine.config.load import load

    config = load(overrides or [])
    path = writable(out, "--out")

    import torch

    from engine.hardware.profile import profile

    found = profile(config, torch.cuda.device_count(), output.say)
    found.calibration.write(path)
    for warning in warnings(found):
        output.say(f"warning: {warning}")
    output.emit({"hardware": payload(found) | {"out": out}}, _text(found, out), as_json=json)


def payload(found: Profile) -> dict[str, Any]:
    """Return all terms, and how well the cost model gives the measured micro-batches back with them."""
    points = [
        {"micro_batch": str(point.case), "measured_s": point.measured_s, "predicted_s": point.predicted_s}
        for point in found.points
    ]
    fit = {"points": len(points), "median_error": found.median_error, "worst_error": abs(found.worst.error)}
    return vars(found.calibration) | {"fit": fit, "spread": found.spread, "measured": points}


def warnings(found: Profile) -> list[str]:
    """Return what to know before trusting the calibration."""
    texts = []
    if found.spread > _GOOD:
        half = f"half of the timings lie {found.spread:.0%} or more above the best"
        texts.append(f"the machine was busy: {half}; run it again when nothing else runs")
    if found.median_error > _GOOD:
        texts.append(f"the cost model is off by {found.median_error:.0%} in the median")
    if abs(found.worst.error) > _GOOD:
        texts.append(f"the cost model is off by {found.worst.error:+.0%} at worst: {found.worst.case}")
    return texts


def _text(found: Profile, out: str) -> str:
    from engine.config.units import counted
    from engine.hardware.terms import rows

    table = output.table(["term", "value", "how it was measured"], rows(found.calibration, found.measured))
    worst = f"worst {abs(found.worst.error):.1%} ({found.worst.case})"
    fit = (
        f"cost model against {len(found.points)} measured micro-batches: median error {found.median_error:.1%}, {worst}"
    )
    name = found.calibration.cluster
    use = f"written to {out}; use it with cluster={name} cluster.calibration={out}"
    return "\n".join([f"{found.calibration.device}, {counted(found.measured.ranks, 'rank')}", table, "", fit, use])
