"""One rank that measures the network: messages between ranks of two nodes, as rings that span nodes exchange them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import torch.distributed as dist

from engine.attention.comm import RingComm
from engine.config.load import read_resolved
from engine.control.control import Control
from engine.errors import ExitCode
from engine.hardware.device import TRANSFERS, Message
from engine.hardware.measured import NETWORK, Network
from engine.hardware.timing import Run, timed
from engine.parallel.groups import Groups, join_groups
from engine.run.folder import RunFolder

_REPEATS, _WARM_UPS = 12, 2


def measure(folder: RunFolder, first: int, control: Control) -> int:
    """Measure with the `first` ranks on the first node and all others on the second. Rank 0 writes the result.

    Returns the exit code.
    """
    groups = join_groups(read_resolved(folder.resolved), control)
    found = between(groups, RingComm(groups.rings), first)
    if groups.rank == 0:
        (folder.root / NETWORK).write_text(json.dumps(asdict(found)), encoding="utf-8")
    dist.barrier()
    return ExitCode.OK


def between(groups: Groups, comm: RingComm, first: int) -> Network:
    """Time messages of all sizes, by one pair of ranks and by all pairs. Rank i and rank `first` + i are a pair."""
    sizes, pairs = TRANSFERS[groups.device.type], min(first, groups.mesh.hdp - first)
    pair, partner = groups.hdp_rank % first, (groups.hdp_rank + first) % (2 * first)
    if groups.hdp_rank >= 2 * first or pair >= pairs:
        pair = pairs  # more ranks on one node than on the other: this one has no partner

    def exchange(size: int) -> Run:
        return timed(Message(size, comm, groups.device, partner, partner).run, groups.device)

    def times(exchanging: int) -> tuple[tuple[int, float], ...]:
        runs = [exchange(size) if pair < exchanging else None for size in sizes]
        return tuple(zip(sizes, slowest(runs, groups), strict=True))

    return Network(pairs, times(1), times(pairs))


def slowest(runs: Sequence[Run | None], groups: Groups) -> list[float]:
    """Repeat each run on all ranks at once; return the median over repetitions of the slowest rank's seconds.

    Ranks whose run is None wait.
    """
    found = []
    for run in runs:
        taken = []
        for turn in range(_WARM_UPS + _REPEATS):
            dist.barrier()
            seconds = sum(run()) if run is not None else 0.0
            if turn >= _WARM_UPS:
                taken.append(seconds)
        found.append(float(np.median(groups.control.largest(*taken))))
    return found
