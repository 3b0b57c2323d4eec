"""What the part with several ranks on one GPU covers, and when it says that something is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu import nccl
from benchmarks.gpu.nccl import CASES, LEFT_OUT, MESHES, Losses
from engine.cluster.communicators import communicators
from engine.cluster.mesh import Mesh
from engine.config.load import load

pytestmark = pytest.mark.long


def test_meshes_have_every_kind_of_group() -> None:
    kinds = {one.group for mesh in MESHES for one in communicators(Mesh(*mesh), tied=True)}
    assert kinds == {"rings", "hdp", "tp", "pp", "model", "ep", "experts", "tied"}
    assert max(Mesh(*mesh).ranks for mesh in MESHES) <= 8
    assert communicators(Mesh(*LEFT_OUT), tied=True)[-1].group == "tied"


@pytest.mark.parametrize("name", CASES)
def test_cases_are_configs(name: str) -> None:
    ranks, experts, keys = CASES[name]
    base = nccl.EXPERTS if experts else nccl.DENSE
    assert load([*base, *keys, f"cluster.ranks_per_node={ranks}"]).dtype == "fp32"


@pytest.mark.parametrize(
    ("losses", "holds"), [([3.0, 2.0], True), ([3.0, 2.00001], True), ([3.0, 2.01], False), ([3.0], False)]
)
def test_losses_hold_if_they_are_those_of_the_cpu(losses: list[float], holds: bool) -> None:
    row = nccl._compared(Losses(losses, 1.0, []), Losses([3.0, 2.0], 1.0, []), steps=2)
    assert row["holds"] is holds and {"said", "target"} < set(row)


@pytest.mark.slow  # two worlds of processes
def test_groups_of_meshes_sum_and_exchange(tmp_path: Path) -> None:
    rows = list(nccl.meshes(tmp_path, dry_run=True))
    assert all(row["holds"] for row in rows[:-1]) and len(rows) == len(nccl.FEW) + 1
    assert not rows[-1]["holds"], "gloo makes a group without the ranks outside it"
