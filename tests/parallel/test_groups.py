"""Rings talk within one hdp group of a mesh, by HDP ranks: those of a plan."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine.attention.comm import Exchange, RingComm
from engine.cluster.communicators import TRANSFER_SMS, communicators
from engine.cluster.mesh import Mesh
from engine.config.load import load
from engine.config.schema import Config
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


@dataclass
class Made:
    """A group of NCCL: its members and the options that it was created with."""

    ranks: tuple[int, ...]
    options: Any = None


class Splits:
    """Stands in for NCCL on the rank RANK, and records in order what it does for each split of the default group.

    A rank that gets no group from a split takes part alone.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Made] = []
        self.default: Any = None
        for name in ("init_process_group", "new_group", "get_rank", "get_world_size"):
            monkeypatch.setattr(dist, name, getattr(self, name))
        monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
        monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
        monkeypatch.setattr(dist.group, "_WORLD", SimpleNamespace(_get_backend=lambda _: self), raising=False)
        monkeypatch.setattr(type(dist.group), "WORLD", SimpleNamespace(_get_backend=lambda _: self))
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
        monkeypatch.setattr(torch, "zeros", lambda *_, **__: torch.ones(1))
        self._set = monkeypatch.setenv

    def of(self, config: Config, rank: int, ranks: int, local_rank: int = 0) -> list[Made]:
        """Let a rank make its groups."""
        for name, value in {"LOCAL_RANK": local_rank, "RANK": rank, "WORLD_SIZE": ranks}.items():
            self._set(name, str(value))
        self.made = []
        linked = Control(rank)
        linked.agent = Link(-1, -1)
        self.groups = join_groups(config, linked)
        return self.made

    def get_rank(self) -> int:
        return int(os.environ["RANK"])

    def get_world_size(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    def init_process_group(self, backend: str, pg_options: Any = None, **_: Any) -> None:
        assert backend == "nccl"
        self.default = pg_options

    def new_group(
        self, ranks: list[int], timeout: Any = None, backend: str = "nccl", pg_options: Any = None, **more: Any
    ) -> Made:
        assert self.get_rank() in ranks and more == {"use_local_synchronization": True}
        group = Made(tuple(ranks), pg_options)
        if backend == "nccl":
            assert pg_options is None or pg_options._timeout == timeout
            self.made.append(group)
        return group

    def perform_nocolor_split(self, _: Any) -> None:
        self.made.append(Made((self.get_rank(),)))


class Options:
    """Stands in for `ProcessGroupNCCL.Options`."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream, self._timeout = is_high_priority_stream, timedelta(minutes=10)
        self.config = SimpleNamespace(max_ctas=None)


LOADED = load(["recipe=h200-1b-8k"])


def of_mesh(mesh: Mesh, tied: bool) -> Config:
    """A config for GPUs whose ranks are this mesh."""
    config = LOADED
    parallel = config.parallel.model_copy(update={"tp": mesh.tp, "pp": mesh.pp, "ep": mesh.ep})
    return config.model_copy(update={"parallel": parallel, "model": config.model.model_copy(update={"tied": tied})})


SMALL = [Mesh(hdp, tp, pp, ep) for hdp, tp, pp in product((1, 2, 3, 4), repeat=3) for ep in (1, 2, 4) if hdp % ep == 0]


@pytest.mark.parametrize("tied", [False, True])
def test_every_split_takes_all_ranks_in_every_mesh(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank makes equally many groups, and the i-th groups of all ranks are a partition of them."""
    nccl = Splits(monkeypatch)
    for mesh in SMALL:
        config = of_mesh(mesh, tied)
        made = [[group.ranks for group in nccl.of(config, rank, mesh.ranks)] for rank in range(mesh.ranks)]
        assert len({len(groups) for groups in made}) == 1, mesh
        for at_once in zip(*made, strict=True):
            assert all(rank in group for rank, group in enumerate(at_once)), mesh
            assert sorted(rank for group in set(at_once) for rank in group) == list(range(mesh.ranks)), mesh


def test_no_communicator_has_one_rank_or_the_members_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Except rings beside hdp, and both beside ep, whose messages are in flight at the same time."""
    nccl = Splits(monkeypatch)
    for mesh, tied in product(SMALL, (False, True)):
        config, counted = of_mesh(mesh, tied), len(communicators(mesh, tied))
        for rank in range(mesh.ranks):
            made = [group.ranks for group in nccl.of(config, rank, mesh.ranks)]
            assert len(made) == counted, "the memory estimate counts others"
            if tied and mesh.pp > 2 and mesh.place(rank).pp in range(1, mesh.pp - 1):
                assert made.pop() == (rank,)  # no communicator: it takes part in the split only
            assert all(len(group) > 1 for group in made)
            again = len(made) - len(set(made))
            world = 0 if mesh.tp * mesh.pp > 1 else 1  # rings of all ranks, beside the default group
            assert again <= (mesh.hdp > 1) + (mesh.hdp == mesh.ep > 1) - world * (mesh.hdp > 1)


def test_each_group_has_options_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch writes a group's ranks into its options. What runs beside kernels is urgent, and leaves them SMs."""
    nccl = Splits(monkeypatch)
    mesh = Mesh(hdp=4, tp=2, pp=3, ep=2)
    made = nccl.of(of_mesh(mesh, tied=True), 0, mesh.ranks)
    kinds = [one.group for one in communicators(mesh, tied=True)]
    assert kinds == ["rings", "hdp", "tp", "pp", "model", "ep", "experts", "tied"]
    options = {kind: group.options for kind, group in zip(kinds, made, strict=True)} | {"default": nccl.default}
    assert len({id(one) for one in options.values()}) == len(options)
    assert {kind for kind, one in options.items() if one.is_high_priority_stream} == {"default", "rings", "hdp", "pp"}
    sms = {kind: one.config.max_ctas for kind, one in options.items() if one.config.max_ctas is not None}
    assert sms == {"rings": TRANSFER_SMS, "pp": TRANSFER_SMS}


@pytest.mark.parametrize(
    ("version", "overrides", "key"),
    [
        ((2, 25, 1), ["zero.stage=3"], "zero.stage=3"),
        ((2, 25, 1), ["zero.stage=2"], "zero.stage=2"),
        ((2, 25, 1), ["parallel.pp=2"], "parallel.pp=2"),
        ((2, 25, 1), ["parallel.tp=2"], "parallel.tp=2"),
        ((2, 25, 1), ["parallel.ep=2", "model.family=mixtral", "model.experts=4", "model.top_k=2"], "parallel.ep=2"),
        ((2, 25, 1), [], None),
        ((2, 26), ["zero.stage=3"], None),
    ],
)
def test_an_nccl_that_does_not_keep_the_order_of_kernels_is_refused(
    version: tuple[int, ...], overrides: list[str], key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    nccl = Splits(monkeypatch)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    config = load(["recipe=h200-1b-8k", "cluster.ranks_per_node=2", *overrides])
    if key is None:
        nccl.of(config, 0, 2)
        return
    with refused(PreflightError, key) as problems:
        nccl.of(config, 0, 2)
    assert socket.gethostname() in problems[0].message
    nccl.of(load(["recipe=h200-1b-8k", "zero.stage=3"]), 0, 1)  # a single rank has no rings


def test_ranks_share_a_gpu_in_the_test_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl, config = Splits(monkeypatch), load(["recipe=h200-1b-8k", "cluster.ranks_per_node=2"])
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    nccl.of(config, 1, 2, local_rank=1)
    assert (nccl.groups.device.index, os.environ["LOCAL_RANK"]) == (1, "1")
    monkeypatch.setenv("BYTESCALE_ONE_GPU", "1")
    nccl.of(config, 1, 2, local_rank=1)
    assert (nccl.groups.device.index, nccl.groups.local_rank, os.environ["LOCAL_RANK"]) == (0, 1, "0")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    with refused(PreflightError, "BYTESCALE_ONE_GPU=1") as problems:
        nccl.of(config, 1, 2, local_rank=1)
    assert socket.gethostname() in problems[0].message


def test_ranks_need_an_agent_to_find_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    Splits(monkeypatch)
    for name, value in {"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
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
    assert problems[0].message.endswith(why) and socket.gethostname() in problems[0].message


@pytest.mark.world
def test_a_ring_stays_in_its_hdp_group() -> None:
    """Global ranks 0 and 2 share a ring, and 1 and 3 do; each names its peer as HDP rank 0 or 1."""
    assert run_world(4, joined) == [(0, [2.0], 2), (0, [3.0], 2), (1, [0.0], 2), (1, [1.0], 2)]
