"""`bytescale report`: writes the page of a run, or one that compares runs, and their timelines."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from bytescale_cli import output
from bytescale_cli.options import Debug, Json, Trace, check_named_once, plot_path, trace_path, writable


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", readable=False, help="A run folder; several are compared.")
    ],
    out: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The page. Default: RUN/report.html, or comparison.html for several runs."),
    ] = None,
    trace: Trace = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in a browser, if there is a display.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write an HTML page of a run, or one that compares runs.

    The page of a run has its metrics, one measured step, its hosts and versions. A comparison has the ratio of speeds,
    the losses, and the differences between the configs.
    """
    check_named_once(runs)
    timeline = trace_path(trace)
    default = runs[0] / "report.html" if len(runs) == 1 else Path("comparison.html")
    from engine.run.status import config_of

    for run in runs:
        config_of(run)  # before anything is written next to a folder that is not a run
    page = plot_path(out, "--out") or writable(str(default), None, hint="choose another file with --out FILE")
    from engine.report.comparison_page import comparison_page
    from engine.report.run import read_run
    from engine.report.run_page import run_page

    found = [read_run(run, output.say) for run in runs]
    # Paths distinguish folders with equal names.
    names = [run.name for run in found]
    if len(set(names)) < len(names):
        names = list(map(str, runs))
    made = run_page(found[0]) if len(found) == 1 else comparison_page(found, names)
    output.write_file(page, made.html().encode(), None if out is None else "--out")
    if timeline is not None:
        from engine.report.chrome_trace import Process, chrome_trace

        processes = [Process(name, run=run) for name, run in zip(names, found, strict=True)]
        output.write_file(timeline, chrome_trace(processes), "--trace")
    output.say(made.headline.text if len(found) > 1 else f"{made.headline.figure}: {made.headline.text}")
    # Without a display, `webbrowser` would start a text browser in this terminal.
    if open_ and (any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY"))) or sys.platform == "darwin"):
        import webbrowser

        webbrowser.open(page.as_uri())
    answer: dict[str, Any] = {"runs": list(map(str, runs)), "page": str(page), "headline": made.headline.text}
    answer["trace"] = str(timeline) if timeline else None
    lines = [str(page), *([str(timeline)] if timeline else [])]
    output.emit({"report": answer}, "\n".join(lines), as_json=json)
