"""One of the doctor's two ranks, `python -m engine.doctor.rank FOLDER`: sums over both, then sends along a ring.

Its process groups are those of training (engine/parallel/groups.py). It notes each part in a file when it is done, so
the doctor knows which one failed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from engine.control.control import Control
from engine.errors import ExitCode
from engine.run.folder import RunFolder
from engine.trainer.rank import leave, run_rank

ELEMENTS = 1 << 18  # 1 MiB in fp32
PARTS = ("all-reduce", "ring")


def result(folder: RunFolder, part: str) -> Path:
    """The file in which rank 0 writes the seconds that a part took."""
    return folder.root / f"{part}.json"


def work(folder: RunFolder, control: Control) -> int:
    """Do both parts. Raises RuntimeError if a sum or a message is wrong. Returns the exit code."""
    import torch

    from engine.attention.comm import Exchange, RingComm
    from engine.config.load import read_resolved
    from engine.parallel.groups import join_groups

    # The sums and messages go through the code of training, so a failure here would be one of training, too.
    groups = join_groups(read_resolved(folder.resolved), control)
    rank, ranks = groups.rank, groups.mesh.hdp
    comm = RingComm(groups.rings)

    def all_reduce() -> bool:
        values = torch.full((ELEMENTS,), rank + 1.0, device=groups.device)
        return bool((groups.sum(values) == ranks * (ranks + 1) / 2).all())

    def ring() -> bool:
        sent = torch.full((ELEMENTS,), float(rank), device=groups.device)
        received = torch.empty_like(sent)
        before = (rank - 1) % ranks
        comm.post([Exchange(sent, (rank + 1) % ranks, received, before)]).wait()
        return bool((received == before).all())

    for part, run in zip(PARTS, (all_reduce, ring), strict=True):
        run()  # the first one builds connections
        control.largest(0)  # waits for the other rank
        began = time.perf_counter()
        if not run():  # waits for the device
            raise RuntimeError(f"{part}: rank {rank} has a wrong result")
        seconds = time.perf_counter() - began
        control.largest(0)
        if rank == 0:
            result(folder, part).write_text(json.dumps({"seconds": seconds}), encoding="utf-8")
    return ExitCode.OK


if __name__ == "__main__":
    found = RunFolder(Path(sys.argv[1]))
    leave(run_rank(found, lambda stop, control: work(found, control), saves=False))
