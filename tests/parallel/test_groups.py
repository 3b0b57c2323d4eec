"""Rings talk within one hdp group of a mesh, by HDP ranks: those of a plan."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine.attention.comm import Exchange, RingComm
from engine.cluster.mesh import Mesh
from engine.config.load import load
from engine.control.control import Control
from engine.control.link import Link
from engine.errors import PreflightError
from engine.parallel.groups import join_groups
from tests.refusals import refused
from tests.world import control, run_world


def joined() -> tuple[int, list[float], int]:
    """On a rank of a mesh of hdp 2 and tp 2: its HDP rank, what a ring of both HDP ranks brings, and a sum."""
    dist.barrier()  # a group that a rank leaves while others still connect fails there
    dist.destroy_process_group()
    config = load(["recipe=quickstart"])
    # A machine with one GPU: the device is that of the config's cluster, not cuda:LOCAL_RANK.
    torch.cuda.is_available, torch.cuda.device_count = (lambda: True), (lambda: 1)
    groups = join_groups(
        config.model_copy(update={"parallel": config.parallel.model_copy(update={"tp": 2})}), control()
    )
    assert groups.mesh == Mesh(hdp=2, tp=2) and groups.device == torch.device("cpu")
    other = 1 - groups.hdp_rank
    sent, received = torch.tensor([float(groups.rank)]), torch.zeros(1)
    RingComm(groups.rings).post([Exchange(sent, other, received, other)]).wait()
    return groups.hdp_rank, received.tolist(), int(groups.sum(torch.tensor(groups.rank)))


def test_transfers_of_rings_have_priority_over_attention_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a round's K,V arrive after its attention kernel has ended, and nothing overlaps."""
    made: list[dict[str, Any]] = []

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream, self._timeout = is_high_priority_stream, timedelta(minutes=10)

    def new_group(
        ranks: list[int] | None = None, timeout: timedelta | None = None, backend: str = "", **more: Any
    ) -> str:
        made.append({"backend": backend, "timeout": timeout, **more})
        return backend

    fakes = {
        "ProcessGroupNCCL": SimpleNamespace(Options=Options),
        "init_process_group": lambda *_, **__: None,
        "new_group": new_group,
        "all_reduce": lambda *_, **__: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(dist, name, fake, raising=False)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: torch.ones(1))
    for name, value in {"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    linked = Control(1)
    linked.agent = Link(-1, -1)
    join_groups(load(["recipe=h200-1b-8k", "cluster.ranks_per_node=2"]), linked)
    (rings,) = made
    assert rings["backend"] == "nccl" and rings["pg_options"].is_high_priority_stream
    assert rings["pg_options"]._timeout == rings["timeout"]
    with refused(PreflightError):
        join_groups(load(["recipe=h200-1b-8k", "cluster.ranks_per_node=2"]), Control(1))


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (AssertionError("Torch not compiled with CUDA enabled"), "Torch not compiled with CUDA enabled"),
        (RuntimeError("The driver is too old (found 12000). Please update it."), "The driver is too old (found 12000)"),
    ],
)
def test_a_pytorch_that_cannot_use_the_gpu_is_refused(
    error: Exception, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init() -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "init", init)
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    with refused(PreflightError) as problems:
        join_groups(load(["recipe=h200-1b-8k"]), Control(0))
    assert problems[0].message.endswith(why)


@pytest.mark.world
def test_a_ring_stays_in_its_hdp_group() -> None:
    """Global ranks 0 and 2 share a ring, and 1 and 3 do; each names its peer as HDP rank 0 or 1."""
    assert run_world(4, joined) == [(0, [2.0], 2), (0, [3.0], 2), (1, [0.0], 2), (1, [1.0], 2)]
