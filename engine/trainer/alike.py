"""Compares the hosts of a run before its first step: versions of PyTorch and NCCL, cards, and selected kernels.

Each rank selects its kernels alone. A host with another card, another flash-attn or a compiler that fails would train
with other kernels, which round differently and may be slower, and only its log would say so. So ranks must be alike.

Two kinds of ranks may differ, and each is a `part` whose ranks are compared with each other only: hosts to which the
hostfile gives another speed or memory (`class_of`), and the stages of a pipeline, which use different kernels.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections import Counter
from collections.abc import Mapping

import torch

from engine.cluster.gpus import gpus
from engine.cluster.nccl import shares_gpu
from engine.control.control import Control
from engine.errors import HostError
from engine.job import Job


def versions(on_gpus: bool) -> dict[str, str]:
    """Return the versions that must be the same on all hosts."""
    found = {"PyTorch": str(torch.__version__)}
    if on_gpus:
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def card(local_rank: int) -> dict[str, str]:
    """Return the name of a rank's GPU, as a fact."""
    found = gpus()
    index = 0 if shares_gpu() else local_rank
    return {"GPU": found[index].name if index < len(found) else "unknown"}


def class_of(job: Job, rank: int) -> tuple[int, int]:
    """Return the class of the devices of a rank's host, by the hostfile, and the number of classes."""
    classes = sorted({(node.speed, node.memory or 0) for node in job.nodes})
    node = job.nodes[job.cluster.place(rank)[0]]
    return classes.index((node.speed, node.memory or 0)), len(classes)


def check_alike(control: Control, facts: Mapping[str, str], part: int = 0, parts: int = 1) -> None:
    """Check that all ranks of the same part have the same facts. Collective: all ranks must call it.

    Otherwise all raise the same HostError, which names the first host whose fact is not that of most ranks. Only then
    the number of bytes grows with the number of ranks.
    """
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    if control.is_same(digest, part, parts):
        return
    found: list[tuple[str, int, dict[str, str]]] = control.gather([socket.gethostname(), part, dict(facts)])
    for one in range(parts):
        members = [(host, theirs) for host, number, theirs in found if number == one]
        for name in sorted({name for _, theirs in members for name in theirs}):
            values = [(host, theirs.get(name, "nothing")) for host, theirs in members]
            usual, _ = Counter(value for _, value in values).most_common(1)[0]
            odd = next(((host, value) for host, value in values if value != usual), None)
            if odd is not None:
                others = list(dict.fromkeys(host for host, value in values if value == usual))
                more = f" and {len(others) - 1} more" if len(others) > 1 else ""
                message = f"{name} is {odd[1]} on {odd[0]}, but {usual} on {others[0]}{more}"
                hint = 'make it like the others, or leave it out of the hostfile; docs/gpu.md, "Equal hosts"'
                raise HostError(message, hint=hint)
