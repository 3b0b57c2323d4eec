"""Reads the records of NCCL's operations that PyTorch's flight recorder writes, and finds the first that cannot end.

Each rank keeps its last operations in memory and writes them to RUN/logs/nccl-rank-N when its agent asks for them
(engine/launch/agents/rank_process.py), or when NCCL's watchdog ends it. `torchfrtrace RUN/logs -p nccl-rank-` of
PyTorch shows all of them. Its analysis needs torch, the records of all ranks, and the first operations, which long runs
do not keep; the launcher has none of these, and needs one sentence.

Format: torch/csrc/distributed/c10d/FlightRecorder.hpp, a pickle of plain values; the members of a record are those of
`_Operation`.
"""

from __future__ import annotations

import ast
import io
import pickle
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from engine.run.folder import RunFolder

_MOST_BYTES = 1 << 26  # of a file
_READ_S = 10.0  # after which no further file is read: thousands of ranks may have written one each
_NAMED = 8  # ranks in a message
_UNEQUAL = ("all_to_all", "alltoall", "scatter", "gather", "broadcast")  # collectives to which ranks give other sizes
_PEERS = re.compile(r":(send|recv) (\d+)(?:->|<-)(\d+)$")  # both with numbers within the group


class _Group(NamedTuple):
    name: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"the group of {_ranks(self.ranks)}"


class _Operation(NamedTuple):
    """An operation of a group on one rank."""

    group: _Group
    number: int  # of collectives of the group on this rank
    kind: str  # such as all_reduce [[8]], which must be the same on all ranks; of messages, send or recv
    peer: int | None  # of a message, a global rank
    ended: bool
    created: int  # ns


class _Wait(NamedTuple):
    """An operation that has not ended. The smallest is the likeliest cause."""

    certain: int  # 0: ranks differ, 1: ranks without a record may, 2: none is known to
    created: int  # ns
    text: str | None


def first_mismatch(folder: RunFolder, ranks: int, first: int = 0) -> str | None:
    """Say which operation of NCCL cannot end, and which ranks have not begun it; None if the records do not show it.

    `ranks` is the number of ranks of the run; the record of rank `first` is read first.
    """
    found, last = dict[int, list[_Operation]](), time.monotonic() + _READ_S
    for rank in sorted(range(ranks), key=lambda rank: rank != first):
        if time.monotonic() > last:
            break
        with suppress(OSError, ValueError, LookupError, TypeError, SyntaxError, EOFError, pickle.UnpicklingError):
            found[rank] = list(_operations(_load(folder.nccl_record(rank))))
    return min((*_collectives(found), *_messages(found)), default=_Wait(0, 0, None)).text


def _collectives(found: Mapping[int, list[_Operation]]) -> Iterator[_Wait]:
    """Yield, for each group, the first collective that has not ended."""
    groups = defaultdict[_Group, dict[int, dict[int, _Operation]]](dict)
    for rank, operations in found.items():
        for one in operations:
            if one.peer is None and rank in one.group.ranks:
                groups[one.group].setdefault(rank, {})[one.number] = one
    for group, of_rank in groups.items():
        # Full records have lost their oldest operations.
        numbers = range(max(map(min, of_rank.values())), max(map(max, of_rank.values())) + 1)
        for number in numbers:
            here = {rank: known[number] for rank, known in of_rank.items() if number in known}
            waits = [rank for rank, one in here.items() if not one.ended]
            if not waits:
                continue
            kinds = sorted({one.kind for one in here.values()})
            missing = [rank for rank in group.ranks if rank in found and rank not in here]
            silent = [rank for rank in group.ranks if rank not in found]
            wait, of_all = f"{_ranks(waits)} wait{'s' * (len(waits) == 1)}", f"collective {number} of {group}"
            if len(kinds) > 1:
                members = [(kind, [rank for rank, one in here.items() if one.kind == kind]) for kind in kinds]
                certain, why = 0, "; ".join(f"{_ranks(some)} in {kind}" for kind, some in members)
            elif missing:
                certain, why = 0, f"{wait} in {kinds[0]} for {_ranks(missing)}"
            elif silent:
                certain, why = 1, f"{wait} in {kinds[0]}; there is no record of {_ranks(silent)}"
            else:
                certain, why = 2, f"all are in {kinds[0]}, which has not ended"
            yield _Wait(certain, min(here[rank].created for rank in waits), f"{of_all}: {why}")
            break


def _messages(found: Mapping[int, list[_Operation]]) -> Iterator[_Wait]:
    """Yield the first message of each rank that has not ended and that its peer does not send or receive."""
    begun = {
        rank: [one for one in operations if one.peer is not None and not one.ended]
        for rank, operations in found.items()
    }
    for rank, operations in begun.items():
        for one in operations:
            assert one.peer is not None
            other, towards = ("recv", "to") if one.kind == "send" else ("send", "from")
            theirs = begun.get(one.peer)
            if theirs and any((it.kind, it.peer, it.group) == (other, rank, one.group) for it in theirs):
                continue
            why = "there is no record of it" if theirs is None else f"which is in no {other}"
            text = f"{one.kind} of rank {rank} {towards} rank {one.peer} in {one.group}: {why}"
            yield _Wait(int(theirs is None), one.created, text)
            break


def _load(path: Path) -> dict[str, Any]:
    """Unpickle a record. Nothing in it is executed. Raises UnpicklingError if it is none."""
    if path.stat().st_size > _MOST_BYTES:
        raise pickle.UnpicklingError(f"{path} is too large")
    found = _Plain(io.BytesIO(path.read_bytes())).load()
    if not isinstance(found, dict):
        raise pickle.UnpicklingError(f"{path} is no record")
    return found


class _Plain(pickle.Unpickler):
    """Unpickles plain values only."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name} in a record")


def _operations(record: Mapping[str, Any]) -> Iterator[_Operation]:
    """Yield the operations of a rank, the oldest first."""
    groups = {name: tuple(ast.literal_eval(one["ranks"])) for name, one in record["pg_config"].items()}
    for entry in sorted(record["entries"], key=lambda entry: int(entry["time_created_ns"])):
        name = entry["process_group"][0]
        group, what = _Group(name, groups.get(name, ())), str(entry["profiling_name"])
        peers, peer = _PEERS.search(what), None
        if peers is not None:
            peer, kind = sorted(group.ranks)[int(peers[3])], peers[1]
        elif entry["is_p2p"]:
            continue  # the batch to which messages belong
        else:
            kind = what.rpartition(":")[2]
            if not kind.startswith(_UNEQUAL):
                kind += f" {entry['input_sizes']}"
        ended = entry["state"] == "completed" or bool(entry["time_discovered_completed_ns"])
        yield _Operation(group, int(entry["collective_seq_id"]), kind, peer, ended, int(entry["time_created_ns"]))


def _ranks(ranks: Iterable[int]) -> str:
    """Name ranks, such as `ranks 0, 1`."""
    numbers = sorted(ranks)
    more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    return f"rank{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers[:_NAMED]))}{more}"
