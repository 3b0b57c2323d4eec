"""Measures how long a checkpoint stops training, and how ranks share its verification.

`python benchmarks/checkpoints.py [--rounds 3]`. The stall is the time of the copy to host memory; a synchronous save is
the time until the checkpoint is written, hashed, synced and published, with idle ranks, after the copy. CPU seconds are
those of rank 0, for a machine that other work shares.

Verification: the default is what two ranks write for 200M parameters in fp32 with AdamW: the weights by rank 0, and a
half of the master weights and moments by each. Files are read from the page cache, as soon after writing, so hashing is
what is measured.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from engine.folders import random_name
from engine.run.background import BackgroundWriter
from engine.run.checkpoints import TrainState, check_hashes, folder_name, write


def save(checkpoints: Path, mib: int) -> Path:
    """Write a checkpoint of random bytes whose files have the sizes that two ranks write."""
    piece = os.urandom(1 << 20)

    files = {"model": 4, "optimizer-0": 6, "optimizer-1": 6}

    def tensors(folder: Path) -> list[str]:
        for name, share in files.items():
            with (folder / name).open("wb") as file:
                for _ in range(mib * share // 16):
                    file.write(piece)
        return list(files)

    state = TrainState(1, {}, 1, {}, {})
    return write(checkpoints, state, 0, tensors, random_name())


def _verify(folder: Path, part: int, parts: int, barrier: Any, used: Any) -> None:
    barrier.wait()
    began = time.process_time()
    check_hashes(folder, part, parts)
    used[part] = time.process_time() - began
    barrier.wait()


def seconds(folder: Path, ranks: int) -> tuple[float, float]:
    """Verify a checkpoint with `ranks` processes.

    Returns the time until the last has finished, without their start, and the CPU time of the process that used most:
    the time on a machine with a free core for each.
    """
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(ranks + 1)
    used: Any = spawn.Array("d", ranks)
    started = [spawn.Process(target=_verify, args=(folder, part, ranks, barrier, used)) for part in range(ranks)]
    for process in started:
        process.start()
    barrier.wait()
    began = time.perf_counter()
    barrier.wait()
    took = time.perf_counter() - began
    for process in started:
        process.join()
    return took, max(used)


def stalls(rank: int, root: Path, layers: int, rounds: int, port: int) -> None:
    """On a rank: measure how long training stops for a checkpoint, and how long the write takes; rank 0 prints."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch
    import torch.distributed as dist

    from engine.config.load import load
    from engine.models.build import build_model
    from engine.models.common.attention import LocalAttention
    from engine.models.common.initialise import initialise
    from engine.trainer.optimizer import build_optimizer
    from engine.zero.engine import ZeroEngine

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shape = [f"model.layers={layers}", "model.hidden=1024", "model.heads=16", "model.kv_heads=16", "model.ffn=2816"]
    config = load(["recipe=quickstart", "dtype=fp32", "zero.stage=1", *shape])
    model = build_model(config)
    initialise(model, 0)
    engine = ZeroEngine(model, build_optimizer(model, config.optimizer), config)
    tokens = torch.arange(8)
    attention: Any = LocalAttention(tokens)
    engine.backward(engine.forward(tokens, tokens, tokens, attention), 16)
    engine.step(1e-3)  # creates the moments
    engine.reserve_snapshot()
    time.sleep(10)  # as long as a few steps: the first checkpoint of a run comes later
    writer = BackgroundWriter(root, rank, "0" * 16)
    for number in range(rounds + 1):
        dist.barrier()
        began, began_cpu = time.perf_counter(), time.process_time()
        snapshot = engine.snapshot()
        writer.start(TrainState(number, {}, 2, {}, {}), snapshot.write_each, lambda written: None)
        stall, stall_cpu = time.perf_counter() - began, time.process_time() - began_cpu
        writer.wait()
        whole, whole_cpu = time.perf_counter() - began, time.process_time() - began_cpu
        assert not snapshot.short, "too little host memory to measure"
        dist.barrier()
        if rank == 0:
            millions = sum(weight.numel() for weight in model.parameters()) / 1e6
            # A synchronous save needs no copy.
            print(
                f"{millions:.0f}M parameters: stall {stall:.2f} s, synchronous {whole - stall:.2f} s, "
                f"ratio {stall / (whole - stall):.3f}; CPU {stall_cpu:.2f} s, {whole_cpu - stall_cpu:.2f} s, "
                f"ratio {stall_cpu / (whole_cpu - stall_cpu):.3f}",
                flush=True,
            )
            shutil.rmtree(root / folder_name(number))
        dist.barrier()


def measure_stalls(root: Path, layers: int, rounds: int) -> None:
    """Run `stalls` on two ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=stalls, args=(rank, root, layers, rounds, port)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()


def main() -> None:
    """Print the seconds and ratios of each round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=3200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where the checkpoint is written; default: the system's temporary folder")
    parser.add_argument("--layers", type=int, default=16, help="of the model whose checkpoint is written: 200M weights")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as root:
        measure_stalls(Path(root), options.layers, options.rounds)
    with tempfile.TemporaryDirectory(dir=options.folder) as root:
        folder = save(Path(root), options.mib)
        took = [(*seconds(folder, 1), *seconds(folder, 2)) for _ in range(options.rounds)]
    for one, cpu_one, two, cpu_two in (*took, map(statistics.median, zip(*took, strict=True))):
        print(
            f"verify {options.mib} MiB: 1 rank {one:.2f} s, 2 ranks {two:.2f} s, ratio {two / one:.3f}; "
            f"CPU {cpu_one:.2f} s, {cpu_two:.2f} s, ratio {cpu_two / cpu_one:.3f}"
        )
    print("the last line has the medians")


if __name__ == "__main__":
    main()
