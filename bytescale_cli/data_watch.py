"""`bytescale data watch`: the data plane of a run, its processes and what they have packed."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bytescale_cli import output
from bytescale_cli.options import Debug, Json
from bytescale_cli.terminal import harmless, is_live

if TYPE_CHECKING:
    from engine.data.runtime.watching import Watched

_AGAIN_S, _AGAIN = 1.0, 9.0  # between two looks at the run folder: at least, and as a multiple of how long one takes
_REPLACED = 8  # actors that the text shows
_WHY = {  # instead of the names that Ray has for how an actor ended
    "ActorDiedError": "its process ended",
    "ActorUnavailableError": "its process or Ray on its host does not answer",
    "NodeDiedError": "Ray on its host ended",
    "OutOfMemoryError": "its host had too little memory",
    "WorkerCrashedError": "its process ended",
}


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", readable=False, help="Run folder.")],
    once: Annotated[bool, typer.Option("--once", help="Show the present state and exit.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show the data plane of a run, while it runs or after it.

    Its loaders, what they have packed of each source, and with data.runtime=ray its roles and replaced processes. On a
    terminal the tables are refreshed until the run ends or Ctrl-C; otherwise, and with --json, they are shown once.
    Only files of the run folder are read, so it runs on any host that has the folder.
    """
    from engine.data.runtime.watching import watched

    def look() -> tuple[Watched, float]:
        began = time.monotonic()
        return watched(run), time.monotonic() - began

    found, took_s = look()
    if found.running and not once and not json and is_live(sys.stdout):
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        with Live(console=Console(), auto_refresh=False, transient=True) as live:
            while found.running:
                live.update(Text.from_ansi(harmless(_text(found))), refresh=True)
                time.sleep(max(_AGAIN_S, _AGAIN * took_s))
                found, took_s = look()
    output.emit({"watch": _answer(found)}, _text(found), as_json=json)


def _answer(found: Watched) -> dict[str, Any]:
    """Return the state as JSON."""
    return {
        **vars(found),
        "queue": None if found.queue is None else found.queue._asdict(),
        "roles": [one._asdict() for one in found.roles],
        "replaced": [one._asdict() for one in found.replaced],
        "sources": [{"source": one.source, "busy": one.busy, **one.packed._asdict()} for one in found.sources],
    }


def _text(found: Watched) -> str:
    """Format the state: facts, then a table for each part that the run has."""
    state = "running" if found.running else "not running"
    facts = [
        ("runtime", found.runtime),
        ("last step", f"{found.step:,}"),
        ("wait for plan", _seconds(found.plan_wait_s)),
        ("wait for data", _seconds(found.data_wait_s)),
    ]
    if found.loaders is not None:
        why = "" if found.loaders_for is None else f", last changed for {found.loaders_for}"
        facts.append(("loaders", f"{found.loaders:,}{why}"))
    if found.queue is not None and found.queue_at is not None:
        waiting, packing = found.queue
        facts.append(("blocks", f"{waiting:,} waiting, {packing:,} being packed ({_time(found.queue_at)})"))
    parts = [output.record(f"{found.run}: {state}", facts)]
    if found.roles:
        held = "" if found.running else "ended"
        roles = [
            [one.role, f"{one.host}", f"{one.epoch}", "-" if one.pid is None else f"{one.pid}", _time(one.since), held]
            if one.vacant is None
            else [one.role, f"{one.host}", f"{one.epoch}", "-", "-", f"lost: {_WHY.get(one.vacant, one.vacant)}"]
            for one in found.roles
        ]
        parts.append(output.table(["role", "host", "epoch", "pid", "since", "state"], roles))
    if found.replaced:
        rows = [
            [
                _time(one.time),
                one.role,
                f"{one.host}",
                f"{one.epoch}",
                "-" if one.by is None else f"{one.by}",
                "-" if one.seconds is None else f"{one.seconds:.2f} s",
                _WHY.get(one.why, one.why),
            ]
            for one in found.replaced[-_REPLACED:]
        ]
        table = output.table(["lost at", "role", "host", "epoch", "next epoch", "replaced after", "why"], rows)
        earlier = len(found.replaced) - _REPLACED
        parts.append(table + (f"\n{earlier:,} earlier; --json has all" if earlier > 0 else ""))
    sources = [
        [
            one.source,
            *(f"{count:,}" for count in (one.packed.blocks, one.packed.documents, one.packed.tokens)),
            f"{one.packed.seconds:,.2f}",
            f"{one.busy:.2f}",
        ]
        for one in found.sources
    ]
    if sources:
        columns = ["source", "packed blocks", "documents", "tokens", "processor s", "busy loaders"]
        parts.append(output.table(columns, sources, right=True))
        if found.step and not any(one.packed.blocks for one in found.sources):
            parts.append("no block was packed in a step: all that were used had been packed before the first one")
    return output.fill("\n\n".join([*parts, *found.warnings]))


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
