"""Hosts that differ are named before the first step, unless the hostfile says that they do."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from engine.config.load import load
from engine.control.control import Control
from engine.errors import HostError
from engine.job import Job
from engine.selection import Candidate, select, selected
from engine.trainer.alike import check_alike, class_of, versions
from engine.trainer.rank import explain
from tests.world import control, run_world

KERNELS = {"attention kernel": "cudnn", "pointwise operations": "torch.compile"}


def compared() -> list[str]:
    here, said = control(), []
    socket.gethostname = lambda: f"gpu-{here.rank}"  # type: ignore[assignment]
    eager = {**KERNELS, "pointwise operations": "eager"}
    # All alike; rank 1 with another kernel; without one; stages that differ; of another class; alike again.
    odd = here.rank == 1
    for facts, part, parts in (
        (KERNELS, 0, 1),
        (eager if odd else KERNELS, 0, 1),
        ({} if odd else KERNELS, 0, 1),
        (eager if odd else KERNELS, int(odd), 3),
        (eager if odd else KERNELS, 2, 3),
        (KERNELS, 0, 1),
    ):
        try:
            check_alike(here, facts, part, parts)
            said.append("")
        except HostError as error:
            cause = explain(error)
            assert cause.whole and cause.code == 3
            said.append(cause.problem.message)
    return said


@pytest.mark.world
def test_the_host_that_differs_is_named_by_all_ranks() -> None:
    other = "pointwise operations is eager on gpu-1, but torch.compile on gpu-0 and 1 more"
    missing = "attention kernel is nothing on gpu-1, but cudnn on gpu-0 and 1 more"
    assert run_world(3, compared) == [["", other, missing, "", other, ""]] * 3


def test_hosts_of_another_speed_or_memory_are_a_class(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=2\nb slots=2 speed=50%\nc slots=2\nd slots=2 memory=40GiB\n")
    job = Job(load(["recipe=h200-1b-8k", f"cluster.hostfile={hosts}"]))
    classes = [class_of(job, rank)[0] for rank in range(8)]
    assert class_of(job, 0)[1] == len(set(classes)) == 3
    assert classes[0] == classes[1] == classes[4] and classes[2] != classes[6] != classes[0]


def test_what_a_rank_has_selected_is_known_by_name() -> None:
    select(
        "a test's operation", [Candidate("broken", "", lambda: 1, lambda it: "no"), Candidate("plain", "", lambda: 2)]
    )
    assert selected()["a test's operation"] == "plain"
    assert "PyTorch" in versions(False) and "NCCL" not in versions(False)
    check_alike(Control(0), selected())
