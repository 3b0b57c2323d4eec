"""The state of the data plane of a run, from the files of its run folder: on any host, during the run or after it.

```
 data/events-*.jsonl roles, replaced actors, how many loaders there are, blocks that wait
 metrics.jsonl       what loaders have packed, waits of the ranks
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from engine.config.sources import source_configs
from engine.data.blocks.work import Cost, Queued, joined_costs
from engine.data.runtime.events import QUEUE, SCALED, read_events
from engine.errors import ConfigError
from engine.files import LOCK
from engine.run.folder import RunFolder
from engine.run.metrics import read_metrics
from engine.run.status import config_of, is_locked

_OF_ROLES = ("lost", "taken")  # events of the supervisor (engine/remote/supervisor.py)
_FIRST = ("start", "restart")  # why a role is taken in which no actor was lost
_LAST_STEPS = 10  # in which loaders are counted that were at work
_MOST, _MOST_PACKED = 2**48, 2**63  # of a number in an event, and of one of packed blocks
_NUMBERS: Mapping[str, tuple[type, ...]] = {
    "time": (int, float),
    "seconds": (int, float),
    "step": (int,),
    "before": (int,),
    "after": (int,),
    "host": (int, type(None)),
    "epoch": (int,),
    "pid": (int,),
    "waiting": (int,),
    "packing": (int,),
}
Event = Mapping[str, Any]  # of events.py


class Role(NamedTuple):
    """A role of the data plane, and the actor that has it."""

    role: str
    host: int
    epoch: int
    pid: int | None  # None: an earlier version has not written it
    since: float  # seconds since 1970
    vacant: str | None  # why the actor is lost, while no other one has the role


class Replaced(NamedTuple):
    """An actor that was lost."""

    time: float  # seconds since 1970
    role: str  # standby: it had none
    host: int
    epoch: int
    why: str
    by: int | None  # the epoch of the actor that took the role; None without one
    seconds: float | None  # without an actor


class Source(NamedTuple):
    """What loaders have done for a source in the steps of the run."""

    source: str
    packed: Cost
    busy: float  # loaders that were at work on it in the last steps, on average


@dataclass(frozen=True)
class Watched:
    """The state of a data plane."""

    run: str
    runtime: str  # data.runtime
    running: bool
    step: int  # the last finished one
    loaders: int | None  # of all hosts, after the last change; None: there was none
    loaders_for: str | None  # the source for which their number was changed last
    queue: Queued | None  # of all hosts, as it was last noted; None: it never was
    queue_at: float | None  # when, in seconds since 1970
    plan_wait_s: float | None  # in the last step
    data_wait_s: float | None
    roles: Sequence[Role]
    replaced: Sequence[Replaced]
    sources: Sequence[Source]
    warnings: Sequence[str]  # files that are damaged


def watched(run: Path) -> Watched:
    """Read the state of the data plane of a run.

    Raises ConfigError if `run` is not the folder of a run, or if the run has no data plane: token files need none.
    """
    config, folder, warnings = config_of(run), RunFolder(run), list[str]()
    sources = source_configs(config.data)
    texts = [name for name, source in sources.items() if source.format != "tokens"]
    if config.data.runtime == "local" and not texts:
        hint = f"`bytescale runs status {run}` shows how far it is"
        raise ConfigError("has no data plane: its ranks read token files directly", key=str(run), hint=hint)
    running = is_locked(folder.root / LOCK)
    lines = read_metrics(folder.metrics, warnings.append, growing=running)
    events = plane_events(folder)
    last: Mapping[str, Any] = lines[-1] if lines else {"step": 0}
    roles, replaced = _roles(events)
    changes, packed, busy = loaders_of(events), _packed(lines), _packed(lines[-_LAST_STEPS:])
    seconds = sum(line.get("step_s") or 0.0 for line in lines[-_LAST_STEPS:])
    queues = [event for event in events if event["what"] == QUEUE]
    changed_for = [event.get("source") for event in events if event["what"] == SCALED]
    return Watched(
        run=str(run),
        runtime=config.data.runtime,
        running=running,
        step=last["step"],
        loaders=changes[-1][1] if changes else None,
        loaders_for=changed_for[-1] if changed_for else None,
        queue=Queued(queues[-1]["waiting"], queues[-1]["packing"]) if queues else None,
        queue_at=queues[-1]["time"] if queues else None,
        plan_wait_s=last.get("plan_wait_s"),
        data_wait_s=last.get("data_wait_s"),
        roles=roles,
        replaced=replaced,
        sources=[
            Source(name, packed.get(name, Cost()), busy.get(name, Cost()).seconds / seconds if seconds > 0 else 0.0)
            for name in texts
        ],
        warnings=warnings,
    )


def plane_events(folder: RunFolder) -> list[Event]:
    """Return the events of the data plane of a run so far. Those whose values have other types are left out."""
    return [event for event in read_events(folder) if _is_known(event)]


def _is_known(event: Event) -> bool:
    """Return whether values have the types that are used here: after a power loss a line may contain anything."""
    for name, types in _NUMBERS.items():
        if name in event and not (type(event[name]) in types and abs(event[name] or 0) < _MOST):
            return False
    if not isinstance(event["what"], str):
        return False
    if event["what"] == SCALED:
        return {"step", "before", "after"} <= event.keys() and isinstance(event.get("source"), str | None)
    if event["what"] == QUEUE:
        return {"waiting", "packing"} <= event.keys()
    if event["what"] in _OF_ROLES:
        is_text = all(isinstance(event.get(name), str) for name in ("role", "why"))
        return is_text and event.get("host") is not None and {"epoch", "seconds"} <= event.keys()
    return True


def loaders_of(events: Sequence[Event]) -> list[tuple[int, int]]:
    """Return the loaders of all hosts together, as (first step, how many); steps increase, and the first is 0.

    What was recorded in steps that a resumed run has run again is left out.
    """
    found, of_host = list[tuple[int, int]](), dict[int | None, int]()
    for event in events:
        if event["what"] == SCALED:
            host = event.get("host")
            if host not in of_host:  # it had so many from the start
                found = [(step, count + event["before"]) for step, count in found or [(0, 0)]]
            of_host[host] = event["after"]
            while found[-1][0] >= max(1, event["step"]):
                found.pop()
            found.append((max(1, event["step"]), sum(of_host.values())))
    return found


def packed_of(line: Mapping[str, Any]) -> dict[str, Cost]:
    """Return what loaders have packed in a step, by source; `line` is that of the metrics."""
    found, costs = dict[str, Cost](), line.get("packed")
    for name, cost in costs.items() if isinstance(costs, dict) else ():
        values: list[Any] = [cost.get(field) for field in Cost._fields] if isinstance(cost, dict) else [None]
        if all(type(value) in (int, float) and 0 <= value < _MOST_PACKED for value in values):
            found[name] = Cost(*values)
    return found


def _packed(lines: Sequence[Mapping[str, Any]]) -> dict[str, Cost]:
    """Return what loaders have packed in these steps, by source."""
    found = dict[str, Cost]()
    for line in lines:
        found = joined_costs(found, packed_of(line))
    return found


def _roles(events: Sequence[Event]) -> tuple[list[Role], list[Replaced]]:
    """Return the roles after these events, those of the last start of the run, and the actors that were lost."""
    roles, replaced = dict[str, Role](), list[Replaced]()
    for event in events:
        if event["what"] not in _OF_ROLES:
            continue
        name, host, epoch, why = (event[key] for key in ("role", "host", "epoch", "why"))
        if event["what"] == "taken":
            roles[name] = Role(name, host, epoch, event.get("pid"), event["time"], None)
            # The actor that was lost is the last one with this role.
            for at in range(len(replaced) - 1, -1, -1) if why not in _FIRST else ():
                if replaced[at].role == name:
                    replaced[at] = replaced[at]._replace(by=epoch, seconds=event["seconds"])
                    break
        else:
            replaced.append(Replaced(event["time"], name, host, epoch, why, None, None))
            if name in roles:
                roles[name] = roles[name]._replace(vacant=why)
    return list(roles.values()), replaced
