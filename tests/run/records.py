"""Records of NCCL's operations in the format of PyTorch's flight recorder."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

from engine.run.folder import RunFolder

Groups = Mapping[str, Sequence[int]]


def operation(
    group: str, number: int, what: str, at: int, ended: bool = False, sizes: Sequence[int] = (8,)
) -> dict[str, Any]:
    """An operation that was begun `at` this time; `what` is such as `all_reduce`, or `send 0->1` within the group."""
    message = "->" in what or "<-" in what or what == "coalesced"
    return {
        "process_group": (group, "undefined"),
        "collective_seq_id": number,
        "p2p_seq_id": number if message else 0,
        "profiling_name": f"nccl:{what}",
        "time_created_ns": at,
        "input_sizes": [list(sizes)],
        "state": "completed" if ended else "scheduled",
        "time_discovered_completed_ns": at + 1 if ended else None,
        "is_p2p": message,
    }


def write(folder: RunFolder, rank: int, groups: Groups, *operations: dict[str, Any]) -> None:
    """Write the record of a rank."""
    config = {name: {"name": name, "desc": "undefined", "ranks": str(list(ranks))} for name, ranks in groups.items()}
    folder.logs.mkdir(exist_ok=True)
    content = {"version": "2.10", "pg_config": config, "entries": list(operations)}
    folder.nccl_record(rank).write_bytes(pickle.dumps(content))
