"""What the part with several ranks on one GPU covers, and when it says that something is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Event

import pytest

from benchmarks.gpu import nccl
from benchmarks.gpu.nccl import CASES, LEFT_OUT, MESHES, Losses
from engine.cluster.communicators import communicators
from engine.cluster.mesh import Mesh
from engine.config.load import load
from engine.run.folder import RunFolder
from tests.run.records import operation, write

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


@pytest.mark.parametrize(
    ("said", "dry_run", "holds"),
    [
        ("rank 1 was stopped by a signal; NCCL: collective 7 of the group of ranks 0, 1: {}", False, True),
        ("rank 1 was stopped by a signal", False, False),
        ("rank 1 was stopped by a signal", True, True),
        ("rank 0 failed", True, False),
    ],
)
def test_a_stopped_rank_is_found_if_the_operation_that_waits_is_named(
    said: str, dry_run: bool, holds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU in the message too; in a dry run, over gloo, from a record that PyTorch makes here."""
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    if not dry_run:
        write(folder, 0, {"0": [0, 1]}, operation("0", 7, "all_reduce", 1))
    monkeypatch.setattr(nccl, "_bytescale", lambda *_: (tmp_path / "report.html").write_text("could not end"))
    run, again = Future[Losses](), Losses([3.0], 1.0, [])
    run.set_exception(RuntimeError(said.format("rank 0 waits in all_reduce [[8]]; there is no record of rank 1")))
    done, found = nccl._recorded(folder, run, lambda: again, dry_run)
    assert done == again and found["holds"] is holds and found["records"] == ["nccl-rank-0"]
    assert "rank 0 waits in all_reduce [[8]]" in found["named"]


@pytest.mark.slow  # a process that imports torch
@pytest.mark.parametrize("case", nccl.ERRORS)
def test_an_error_of_cuda_is_a_failed_gpu_only_if_it_says_so(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = nccl._failing(case, dry_run=True)
    assert row["holds"] and row["hardware"] is nccl.ERRORS[case].hardware
    other = nccl.ERRORS[case]._replace(hardware=not nccl.ERRORS[case].hardware)
    monkeypatch.setitem(nccl.ERRORS, case, other)
    assert not nccl._failing(case, dry_run=True)["holds"]


def test_sections_run_at_once_and_their_rows_come_as_they_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time on a GPU is short: rows that are not written when it ends are lost."""
    second, seen = Event(), Event()

    def waits(folder: Path, dry_run: bool) -> Iterator[nccl.Row]:
        yield {"case": 1}
        assert second.wait(60) and folder.exists()
        yield {"case": 3}

    def other(folder: Path, dry_run: bool) -> Iterator[nccl.Row]:
        assert seen.wait(60)
        yield {"case": 2}
        second.set()

    monkeypatch.setattr(nccl, "SECTIONS", {"a": waits, "b": other})
    rows = []
    for row in nccl.rows_of(["a", "b"], dry_run=False):
        rows.append((row["section"], row["case"]))
        seen.set()
    assert rows == [("a", 1), ("b", 2), ("a", 3)]
