"""Measures how the time to verify a checkpoint falls with the number of ranks that share the hashing.

`python benchmarks/checkpoints.py [--mib 3200] [--rounds 3]`. The default is what two ranks write for 200M parameters in
fp32 with AdamW: the weights by rank 0, and a half of the master weights and moments by each. Files are read from the
page cache, as soon after writing, so hashing is what is measured.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from engine.run.checkpoints import TrainState, check_hashes, write


def save(checkpoints: Path, mib: int) -> Path:
    """Write a checkpoint of random bytes whose files have the sizes that two ranks write."""
    piece = os.urandom(1 << 20)

    def tensors(folder: Path) -> None:
        for name, share in (("model", 4), ("optimizer-0", 6), ("optimizer-1", 6)):
            with (folder / name).open("wb") as file:
                for _ in range(mib * share // 16):
                    file.write(piece)

    state = TrainState(1, {}, 1, {}, {})
    return write(checkpoints, state, 0, tensors, lambda facts: [facts])


def _verify(folder: Path, part: int, parts: int, barrier: Any) -> None:
    barrier.wait()
    check_hashes(folder, part, parts)
    barrier.wait()


def seconds(folder: Path, ranks: int) -> float:
    """Verify a checkpoint with `ranks` processes; return the time until the last has finished, without their start."""
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(ranks + 1)
    started = [spawn.Process(target=_verify, args=(folder, part, ranks, barrier)) for part in range(ranks)]
    for process in started:
        process.start()
    barrier.wait()
    began = time.perf_counter()
    barrier.wait()
    took = time.perf_counter() - began
    for process in started:
        process.join()
    return took


def main() -> None:
    """Print the seconds of each round and the ratio of their medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=3200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where the checkpoint is written; default: the system's temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as root:
        folder = save(Path(root), options.mib)
        took = [(seconds(folder, 1), seconds(folder, 2)) for _ in range(options.rounds)]
    for one, two in took:
        print(f"{options.mib} MiB: 1 rank {one:.2f} s, 2 ranks {two:.2f} s, ratio {two / one:.3f}")
    one, two = (statistics.median(column) for column in zip(*took, strict=True))
    print(f"medians: 1 rank {one:.2f} s, 2 ranks {two:.2f} s, ratio {two / one:.3f}")


if __name__ == "__main__":
    main()
