"""`bytescale profile-hardware`: measures this machine and writes a calibration for the cost model."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bytescale_cli import output
from bytescale_cli.options import ConfigFile, Debug, Json, Overrides, loaded, writable

if TYPE_CHECKING:
    from engine.hardware.profile import Profile

_TOLERANCE = 0.15  # relative error or spread above which the user is warned


def profile_hardware(
    overrides: Overrides = None,
    config_file: ConfigFile = None,
    out: Annotated[str, typer.Option(metavar="FILE", help="File to write the calibration to.")] = "calibration.json",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure this machine and write its calibration. Use it with cluster.calibration=FILE. Takes 1 to 3 minutes."""
    # The config must name a calibration if the cluster has no data sheet. This command writes it, so any name is valid
    # here.
    config = loaded([*(overrides or []), "cluster.calibration=being-measured"], config_file)
    path = writable(out, "--out")

    from engine.cluster.gpus import visible_gpus
    from engine.config.devices import uses_gpus
    from engine.config.units import counted
    from engine.hardware.profile import profile
    from engine.hardware.terms import rows

    found = profile(config, visible_gpus() if uses_gpus(config) else 0, output.say)
    # Written before anything is shown: the measurement took minutes.
    found.calibration.write(path)
    for warning in warnings(found):
        output.say(f"warning: {warning}")

    # How well the cost model fits shows whether the calibration can be trusted.
    table = output.table(["term", "value", "how it was measured"], rows(found.calibration, found.measured))
    errors = f"median error {found.median_error:.1%}, worst {abs(found.worst.error):.1%} ({found.worst.case})"
    forward, backward = (f"{1e3 * extra:.3g} ms" for extra in found.measured.shape_build_s)
    bound = counted(len(found.launch_bound), "launch-bound one")
    lines = [
        f"{found.calibration.device}, {counted(found.measured.ranks, 'rank')}, attention by {found.measured.kernel}",
        table,
        "",
        f"cost model against {len(found.points)} measured micro-batches: {errors}",
        *([f"not used: {bound} (the time of launching kernels, not of the GPU's work)"] if found.launch_bound else []),
        f"the first attention call with a new shape takes longer by {forward} forward, {backward} backward",
        f"written to {out}; use it with cluster={found.calibration.cluster} cluster.calibration={out}",
    ]
    output.emit({"hardware": payload(found) | {"out": out}}, output.fill("\n".join(lines)), as_json=json)


def payload(found: Profile) -> dict[str, Any]:
    """Build the JSON result: every calibration term, the spread of the timings, and the fit of the cost model.

    The fit is the measured and the predicted time of each micro-batch, and the median and the largest error. `nominal`
    names the terms that were not measured. `shape_build_s` is the additional time of the first attention call with a
    shape. On a GPU, `measured` has the micro-batches that are used, and `launch_bound` the others with their times
    (`engine.hardware.fit.split_launch_bound`).
    """
    from engine.hardware.terms import nominal_terms

    points = [
        {"micro_batch": str(point.case), "measured_s": point.measured_s, "predicted_s": point.predicted_s}
        for point in found.points
    ]
    fit = {"points": len(points), "median_error": found.median_error, "worst_error": abs(found.worst.error)}
    launch_bound = [{"micro_batch": str(case), "measured_s": timing.total_s} for case, timing in found.launch_bound]
    ours = found.measured
    return vars(found.calibration) | {
        "fit": fit,
        "spread": found.spread,
        "measured": points,
        "launch_bound": launch_bound,
        "nominal": list(nominal_terms(found.calibration, ours)),
        "kernel": ours.kernel,
        "shape_build_s": {"forward": ours.shape_build_s[0], "backward": ours.shape_build_s[1]},
        "copies": asdict(ours.copies),
        "transfers": [{"bytes": size, "s": seconds} for size, seconds in ours.transfers],
        "network": None if ours.network is None else asdict(ours.network),
    }


def warnings(found: Profile) -> list[str]:
    """List reasons not to trust the calibration: timings that vary, or a cost model that predicts them badly."""
    texts = []
    if found.measured.kernel == "reference":
        texts.append(
            "attention used the reference kernel, because no fused one supports the recipe's dtype and head size"
        )
    if found.spread > _TOLERANCE:
        slow = f"a typical run took {found.spread:.0%} longer than the fastest"
        texts.append(f"the machine was busy: {slow}; run it again when the machine is idle")
    if found.median_error > _TOLERANCE:
        texts.append(f"the median error of the cost model is {found.median_error:.0%}")
    if abs(found.worst.error) > _TOLERANCE:
        texts.append(f"the largest error of the cost model is {found.worst.error:+.0%}: {found.worst.case}")
    return texts
