"""Runs a function on a world of gloo processes and returns each rank's result.

Processes are forked from a server that has imported torch and DeepSpeed. Starting a world still takes seconds, so put
several cases into one. The process that calls `run_world` serves as the agent of the ranks.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from engine.control.branch import Branch
from engine.control.control import Control
from engine.control.link import RANK_LINK, Link
from tests.composed import FOLDER, kept
from tests.tiers import begins_world

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "torch.distributed",
        "deepspeed",
        "torch._dynamo",  # creating an optimizer imports it
        "engine.zero.engine",
        "tests.warm",
    ]
)


def run_world(size: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 240) -> list[Any]:
    """Call `function(*arguments)` on each rank of a new gloo world; return the results, rank 0 first.

    `function` must be importable. Raises AssertionError with the traceback of the rank that failed first; a rank
    that dies or does not answer in time fails the world too. Leaves no process behind.
    """
    begins_world()
    with tempfile.TemporaryDirectory() as folder:
        pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(size)]
        sockets = [_CONTEXT.Pipe() for _ in range(size)]  # between each rank and its agent
        rendezvous, composed = Path(folder) / "rendezvous", os.environ.get(FOLDER)
        processes = [
            _CONTEXT.Process(
                target=_rank,
                args=(rank, size, rendezvous, pipes[rank][1], sockets[rank][1], composed, function, arguments),
            )
            for rank in range(size)
        ]
        try:
            for process in processes:
                process.start()
            for _, sender in [*pipes, *sockets]:
                sender.close()
            links = [Link(ours.fileno(), ours.fileno()) for ours, _ in sockets]
            return _collect([receiver for receiver, _ in pipes], links, timeout_s)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
                    process.close()
            for receiver, _ in [*pipes, *sockets]:
                receiver.close()


@cache
def control() -> Control:
    """The collectives of this rank of a world."""
    return Control(int(os.environ["RANK"]), Link.to_agent())


class Named:
    """The exchanges of this rank for one of several checkpoints of the same step, which have different prefixes."""

    def __init__(self, prefix: object) -> None:
        self.prefix = prefix

    def collect(self, name: str, value: Any) -> list[Any]:
        return control().collect(f"{self.prefix} {name}", value)

    def share(self, name: str, value: Any) -> dict[int, Any]:
        return control().share(f"{self.prefix} {name}", value)


def _collect(receivers: list[Connection], links: list[Link], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline, branch, listening = time.monotonic() + timeout_s, Branch(len(links)), [*links]
    while len(results) < len(receivers):
        waiting = [receiver for rank, receiver in enumerate(receivers) if rank not in results]
        ready = wait([*waiting, *listening, branch], timeout=deadline - time.monotonic())
        for link in [link for link in listening if link in ready]:
            try:
                for message in link.receive():
                    branch.take(link, message)
            except EOFError:
                listening.remove(link)
        if branch in ready:
            branch.work()
        ready = [receiver for receiver in waiting if receiver in ready]
        if not ready and time.monotonic() < deadline:
            continue
        if not ready:
            silent = [rank for rank in range(len(receivers)) if rank not in results]
            raise AssertionError(f"ranks {silent} did not answer within {timeout_s:.0f} s")
        answers = {receivers.index(receiver): _receive(receiver) for receiver in ready}  # type: ignore[arg-type]
        failures = [(failed_at, f"rank {rank} {value}") for rank, (failed_at, value) in answers.items() if failed_at]
        if failures:
            raise AssertionError(min(failures)[1])
        results |= {rank: value for rank, (_, value) in answers.items()}
    return [results[rank] for rank in range(len(receivers))]


def _receive(receiver: Connection) -> tuple[float | None, Any]:
    """Read a rank's answer: when it failed, or None, and its result. A death counts as the earliest failure."""
    try:
        answer: tuple[float | None, Any] = pickle.loads(receiver.recv_bytes())
    except EOFError:
        return -1, "died"
    return answer


def _rank(
    rank: int,
    size: int,
    rendezvous: Path,
    sender: Connection,
    agent: Connection,
    composed: str | None,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    from engine.data.runtime import process

    if composed is not None:
        for module, name, kept_function in kept(Path(composed)):
            setattr(module, name, kept_function)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), OMP_NUM_THREADS="1")
    os.environ[RANK_LINK] = str(os.dup(agent.fileno()))
    agent.close()
    torch.set_num_threads(1)
    process._CONTEXT = _CONTEXT  # planning processes are forked from the server too (tests/warm.py)
    # DeepSpeed collects garbage whenever it creates an engine: .4 s each time with the objects of all libraries.
    gc.freeze()
    try:
        method = f"file://{rendezvous}"
        dist.init_process_group("gloo", method, timedelta(seconds=30), rank=rank, world_size=size)
        result = function(*arguments)
        dist.barrier()
        _send(sender, None, result)
        dist.destroy_process_group()
    except BaseException:
        _send(sender, time.monotonic(), f"failed:\n{traceback.format_exc()}")


def _send(sender: Connection, failed_at: float | None, value: Any) -> None:
    """Pickle by value: `sender.send` would put tensors into shared memory, which may end with this process."""
    sender.send_bytes(pickle.dumps((failed_at, value)))
