"""A killed run resumes exactly: later losses and the ledger equal those of the uninterrupted run, to the last bit.

Each start of these runs imports everything again, which takes seconds. Tests are marked slow where quicker ones cover
what they show.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from engine.control.chaos import Fault
from engine.run.checkpoints import newest_first, read
from tests.faults import Launcher, command, documents, ledger, losses, ranks_of, train_unharmed
from tests.zero.saving import states_of

pytestmark = pytest.mark.world


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return documents(tmp_path_factory.mktemp("data"))


def run_until(arguments: list[str], due: Callable[[], bool], victims: slice) -> int:
    """Start a run, kill -9 some of its ranks as soon as `due`, and return the launcher's exit code."""
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(ranks := ranks_of(process)) < 2:
        assert process.poll() is None, "the run ended before its ranks started"
        time.sleep(0.1)
    while not due():
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.002)
    for rank in ranks[victims]:
        os.kill(rank.pid, signal.SIGKILL)
    return process.wait(60)


EXPERTS = ["model.family=mixtral", "model.experts=4", "model.top_k=2", "balance.by=bias"]
AWAY, CLIP = "optimizer.on_host=true", "optimizer.clip_norm=0.2"
# What is trained, and the phase of step 5 in which rank 1 is killed; None: the launcher is, anywhere after step 4.
UPDATES: dict[str, tuple[list[str], str | None]] = {
    "stage 1, bf16": (["dtype=bf16", CLIP], "update"),
    "stage 2, on the host": (["zero.stage=2", AWAY, CLIP], "backward"),
    "stage 3, bf16, experts": (["memory=zero3_recompute", "dtype=bf16", CLIP, *EXPERTS], "update"),
    "four ranks, experts of two": (["cluster.ranks_per_node=4", "parallel.ep=2", "dtype=bf16", *EXPERTS], "reduce"),
    "four ranks, tp 2, bf16 on the host": (["cluster.ranks_per_node=4", "parallel.tp=2", "dtype=bf16", AWAY], None),
}
FIRST, *OTHERS = UPDATES


def learned(out: Path) -> tuple[list[tuple[float, ...]], dict[str, Tensor]]:
    """The losses and norms of a run, and all tensors of its last checkpoint by place: weights, masters and moments."""
    found = dict[str, Tensor]()

    def add(place: str, value: Any) -> None:
        if isinstance(value, Tensor):
            found[place] = value
        elif isinstance(value, dict | list):
            for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
                add(f"{place} {key}", inner)

    folder = newest_first(out / "checkpoints")[0]
    for rank in range(read(folder).ranks):
        add(f"rank {rank}", states_of(folder, rank))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines], found


@pytest.mark.parametrize("name", [FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_a_step_that_was_cut_is_done_again_to_the_last_bit(name: str, tmp_path: Path, data: Path) -> None:
    """Some ranks may have updated their shards, and others not: the run goes back to the checkpoint of step 3, and has
    the same documents on the same ranks again. In a pipeline: tests/test_faults.py.
    """
    more, phase = UPDATES[name]
    steps = 20 if phase is None else 7  # after step 4 the launcher must not be too late to be killed
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train_unharmed(whole, data, steps, *more)
    launcher = Launcher(command(killed, data, steps, "run.restarts=1", *more), killed)
    if phase is None:
        launcher.wait_for_steps(4)
        launcher.process.kill()
        assert launcher.end(time.time()).code == -signal.SIGKILL
        launcher = Launcher(command(killed, data, steps, *more), killed)
    else:
        launcher.plant(1, Fault("kill-rank", phase, step=5))
    ended = launcher.end(None if phase else time.time())
    assert ended.code == 0 and "resuming from" in ended.said, ended.said
    (before, states), (after, again) = learned(whole), learned(killed)
    assert len(before) == steps and after == before
    assert ledger(killed) == ledger(whole)
    assert states.keys() == again.keys() and len(states) > 10
    assert [place for place, tensor in states.items() if not torch.equal(tensor, again[place])] == []


@pytest.mark.slow  # tests/test_faults.py kills before a checkpoint gets its name
def test_kill_9_during_the_write_of_a_checkpoint_leaves_the_previous_one(tmp_path: Path, data: Path) -> None:
    out = tmp_path / "run"
    arguments, folder = command(out, data, 60), out / "checkpoints"

    def writing() -> bool:
        return bool(newest_first(folder)) and any(folder.glob(".writing-step-*"))

    for _ in range(5):  # a kill after the write is too late; the same command resumes and writes the next one
        assert run_until(arguments, writing, slice(None)) == 137
        left = newest_first(folder)
        if any(folder.glob(".writing-step-*")):
            break
    else:
        pytest.fail("no kill hit the write of a checkpoint")
    state = read(left[0])  # raises if it is damaged
    again = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    assert again.stderr is not None
    said = [again.stderr.readline()]
    while not said[-1].startswith("step "):
        assert said[-1], f"the second run did not go on: {said}"
        said.append(again.stderr.readline())
    again.terminate()
    again.communicate(timeout=60)
    assert again.returncode == 75, "preempted, checkpoint saved"
    assert any("resuming from" in line and left[0].name in line for line in said)
    assert said[-1].startswith(f"step {state.step + 1}/")
    assert read(newest_first(out / "checkpoints")[0]).step == max(losses(out))


def test_kill_9_of_the_launcher_leaves_no_process(tmp_path: Path, data: Path) -> None:
    """Ranks and their planning process end by themselves; otherwise they would occupy a machine that looks idle."""
    process = subprocess.Popen(
        command(tmp_path / "run", data, 1000), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 2):
        assert process.poll() is None
        time.sleep(0.02)
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= 5, "an agent, two ranks, a planning process and its loader"
    process.kill()
    process.wait()
    _, left = psutil.wait_procs(started, timeout=20)
    assert not left


def test_kill_9_of_the_agent_while_a_part_is_written_leaves_the_checkpoint_before(tmp_path: Path, data: Path) -> None:
    """One rank has written its part of the node's file and waits; the other is stopped in the middle of its own."""
    out = tmp_path / "run"
    launcher = Launcher(command(out, data, 12), out)
    launcher.plant(1, Fault("stop-rank", at="write", step=6))
    while not (out / "chaos" / "log.jsonl").exists():
        assert launcher.process.poll() is None
        time.sleep(0.01)
    (agent,) = [
        one for one in psutil.Process(launcher.process.pid).children() if "engine.launch.agents.agent" in one.cmdline()
    ]
    agent.kill()
    assert launcher.end(time.time()).code not in (0, 75)
    (left,) = newest_first(out / "checkpoints")
    assert read(left).step == 3
    (half,) = (out / "checkpoints").glob(".writing-step-00000006.*/step-00000006/zero/*")
    assert half.stat().st_size > 0
    said = train_unharmed(out, data, 12)
    assert any("resuming from" in line and left.name in line for line in said)
    assert len(losses(out)) == 12 and not [*(out / "checkpoints").glob(".*")]


@pytest.mark.slow  # tests/trainer/test_skip.py and test_loop.py have the error
def test_a_run_that_diverges_ends_with_its_last_checkpoint_kept(tmp_path: Path, data: Path) -> None:
    def constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    out = tmp_path / "run"
    rates = ["optimizer.lr=1e20", "optimizer.warmup_steps=0", "run.checkpoint_every=1"]
    done = subprocess.run(command(out, data, 20, *rates), capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    kept = newest_first(out / "checkpoints")[0]
    lines = [json.loads(line, parse_constant=constant) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert read(kept).step == len(lines) == lines[-1]["step"] < 20
    assert f"diverged at step {len(lines) + 1}: loss" in done.stderr
    assert f"--resume {kept}" in done.stderr
