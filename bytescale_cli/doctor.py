"""`bytescale doctor`: checks this machine, and the hosts of a hostfile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from bytescale_cli import output
from bytescale_cli.options import (
    ConfigFile,
    Debug,
    Json,
    Overrides,
    config_as_typed,
    load_with_weights,
    named_as_typed,
    with_aliases,
    with_config,
)

if TYPE_CHECKING:
    from engine.doctor.check import Check

_QUESTIONS = {
    "software": "Is the software complete?",
    "devices": "What do ranks compute on?",
    "storage": "Can a run write its files?",
    "system": "Does the system allow enough?",
    "network": "Can ranks reach each other?",
    "hosts": "Are the hosts ready?",
}


def doctor(
    overrides: Overrides = None,
    config_file: ConfigFile = None,
    hostfile: Annotated[
        str | None, typer.Option(metavar="FILE", help="Also check these hosts; sets cluster.hostfile.")
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Check this machine and the hosts of a hostfile. Exits with 3 if a check fails.

    With a recipe, the checks are those of its runs: enough space for its checkpoints, GPUs for its cluster.
    """
    aliases = {("--hostfile", "cluster.hostfile"): hostfile}
    with config_as_typed(config_file), named_as_typed(aliases):
        config = load_with_weights(with_aliases(with_config(overrides, config_file), aliases))

        from engine.doctor.examine import examine
        from engine.doctor.report import bug_report
        from engine.errors import PreflightError
        from engine.job import Job

        checks = examine(job := Job(config), output.say)
    report = bug_report(checks, job)
    wrong, error = [check.name for check in checks if check.state == "failed"], None
    if wrong:
        message = f"{len(wrong)} of {len(checks)} checks failed: {', '.join(wrong)}"
        error = PreflightError(message, hint="each one suggests a fix")
    answer = {"ok": not wrong, "checks": [asdict(check) for check in checks], "report": report}
    states = Counter(check.state for check in checks)
    counts = ", ".join(f"{states[state]} {state}" for state in ("ok", "warning", "failed", "skipped") if states[state])
    shown = f"{_text(checks)}\n\n{counts}\n\n{output.title('To report a bug, paste this:')}\n{output.fill(report)}"
    output.emit({"doctor": answer}, shown, as_json=json, error=error)


def _text(checks: Sequence[Check]) -> str:
    """Format a table for each section. For hosts, only failed checks have a row; each host has one with a summary."""
    from engine.config.units import counted

    parts = []
    for section, question in _QUESTIONS.items():
        of_section = [check for check in checks if check.section == section]
        rows = []
        for check in of_section:
            host, colon, name = check.name.partition(": ")
            if colon and check.state in ("ok", "skipped"):
                if name != "ssh":
                    continue
                fine = sum(one.state == "ok" and one.name.startswith(f"{host}: ") for one in of_section)
                rows.append([check.state, host, f"{check.message}; {counted(fine, 'check')} ok"])
                continue
            rows.append([check.state, check.name, check.message])
            if check.hint:
                rows.append(["", "", f"-> {check.hint}"])
        if rows:
            parts.append(f"{output.title(question)}\n{output.table(['state', 'check', 'result'], rows)}")
    return "\n\n".join(parts)
