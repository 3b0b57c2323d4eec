"""Rings talk within one hdp group of a mesh, by HDP ranks: those of a plan."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.distributed as dist

from engine.attention.comm import Exchange, RingComm
from engine.cluster.mesh import Mesh
from engine.config.load import load
from engine.parallel.groups import join_groups
from tests.world import run_world


def joined(port: int) -> tuple[int, list[float], int]:
    """On a rank of a mesh of hdp 2 and tp 2: its HDP rank, what a ring of both HDP ranks brings, and all ranks' sum."""
    dist.barrier()  # a group that a rank leaves while others still connect fails there
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    config = load(["recipe=quickstart"])
    groups = join_groups(config.model_copy(update={"parallel": config.parallel.model_copy(update={"tp": 2})}))
    assert groups.mesh == Mesh(hdp=2, tp=2) and groups.device == torch.device("cpu")
    other = 1 - groups.hdp_rank
    sent, received = torch.tensor([float(groups.rank)]), torch.zeros(1)
    RingComm(groups.rings).post([Exchange(sent, other, received, other)]).wait()
    total = torch.tensor(groups.rank)
    dist.all_reduce(total, group=groups.control)
    return groups.hdp_rank, received.tolist(), int(total)


@pytest.mark.world
def test_a_ring_stays_in_its_hdp_group() -> None:
    """Global ranks 0 and 2 share a ring, and 1 and 3 do; each names its peer as HDP rank 0 or 1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert run_world(4, joined, port) == [(0, [2.0], 6), (0, [3.0], 6), (1, [0.0], 6), (1, [1.0], 6)]
