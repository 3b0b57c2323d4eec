"""What the benchmarks share: a case becomes rows, which are printed as a table or written as JSON.

    python benchmarks/NAME.py [CASE ...] [--json] [options of the benchmark]

Without a CASE all of them run; `CASE` stands for itself and for those that begin with `CASE/`. A row is printed as soon
as it is measured. The last line, and the JSON, have the machine, the commit and the command line. The exit code is 4 if
a row misses its target, and 2 if there is no such case. benchmarks/gpu has its own driver, whose cases are processes
and may fail.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MISSED = 4  # exit code: a row misses its target

Row = dict[str, Any]  # figures by name; `holds` is False where a target was missed; lists are in the JSON only
Case = tuple[str, Callable[[], Iterable[Row]]]  # its name, and what yields its rows


def main(
    about: str | None,
    cases: Callable[[argparse.Namespace], Iterator[Case]],
    options: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
    summary: Callable[[list[Row]], Row] = lambda rows: {},
) -> int:
    """Run the cases that the command line names, print their rows, and return the exit code.

    `options` adds options to the parser, `cases` gets their values. `summary` adds figures over all rows.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="run only these; default: all")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    rows, names = list[Row](), list[str]()
    columns: Sequence[str] = ()
    # Rows are printed as soon as they are measured, because some cases take minutes.
    for name, work in cases(arguments):
        names.append(name)
        if arguments.cases and not any(f"{name}/".startswith(f"{wanted}/") for wanted in arguments.cases):
            continue
        for row in work():
            rows.append(row)
            if not arguments.json:
                columns = _print_row(row, columns)
    if not rows:
        parser.error(f"no case {' '.join(arguments.cases)}; there are {', '.join(names)}")
    whole = summary(rows)
    if arguments.json:
        print(json.dumps({**origin(), "rows": rows, "summary": whole}))
    else:
        print("".join(f"\n{name}: {cell(value)}" for name, value in whole.items()))
        print(", ".join(f"{name}: {value}" for name, value in origin().items()))
    return MISSED if any(row.get("holds") is False for row in rows) else 0


def _print_row(row: Row, columns: Sequence[str]) -> Sequence[str]:
    """Print a row, below a header if its columns are not those of the row before; return its columns."""
    now = [name for name, value in row.items() if not isinstance(value, list)]
    if now != columns:
        print(f"{'' if not columns else chr(10)}| {' | '.join(now)} |\n{'|---' * len(now)}|")
    print(f"| {' | '.join(cell(row[name]) for name in now)} |", flush=True)
    return now


def cell(value: Any) -> str:
    """Format a figure: four significant digits, and thousands with commas."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def origin() -> dict[str, str]:
    """Where and when rows were measured: date, commit, machine, versions, and the command line."""
    return {
        "command": " ".join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "machine": f"{os.cpu_count()} cores of {_processor()}",
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
    }


def _commit() -> str:
    """The checkout's commit, marked if files differ from it; empty outside of a repository, and without git."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, check=False).stdout.decode().strip()
    except FileNotFoundError:
        return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
