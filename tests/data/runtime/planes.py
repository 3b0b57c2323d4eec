"""Writes run folders with events of a data plane, without a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.config.load import load
from engine.config.resolved import resolved_yaml
from engine.run.folder import RunFolder

COST = {"blocks": 2, "documents": 30, "bytes": 2000, "tokens": 900, "seconds": 0.5, "memory": 7}


def event(what: str, role: str, epoch: int, why: str, **more: Any) -> dict[str, Any]:
    """A line of the supervisor; its time is its epoch."""
    return {"time": float(epoch), "what": what, "role": role, "host": 0, "epoch": epoch, "why": why} | (
        {"seconds": 0.25, "pid": 100 + epoch} | more
    )


def write(folder: Path, events: list[Any], lines: list[Mapping[str, Any]], *overrides: str) -> Path:
    """Write the folder of a run with these events and metrics."""
    run = RunFolder(folder)
    run.plane_events.mkdir(parents=True)
    run.resolved.write_text(resolved_yaml(load([f"run.out={folder}", *overrides])))
    (run.plane_events / "events-host-1.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    run.metrics.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return folder
