"""A snapshot does not change while training goes on."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine.zero import snapshot as module
from engine.zero.snapshot import Snapshot
from tests.world import run_world
from tests.zero.test_reshard import KINDS, config_of, engine_of, gather, train

CPU = torch.device("cpu")


def states(scale: float) -> dict[str, Any]:
    flat = scale * torch.arange(24.0)
    return {
        "module": OrderedDict(a=flat[:6].view(2, 3), same=flat[:6].view(2, 3), b=flat[6:].view(6, 3).T),
        "nested": [{"x": (flat[3:4].bfloat16(), torch.tensor(7), torch.empty(0, 5))}, "text"],
        "lr": scale,
    }


def assert_equal(found: Any, expected: Any) -> None:
    """Compare nested values to the last bit."""
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_equal(found[key], value)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        assert found == expected


def test_states_are_written_as_they_were_when_they_were_copied(tmp_path: Path) -> None:
    snapshot = Snapshot(CPU, 2)
    for scale in (1.0, 3.0):  # the second time, in the same memory
        snapshot.create(None)
        live = states(scale)
        snapshot.save(live, "./zero/a.pt")
        live["module"]["a"].zero_()
        live["nested"][0]["x"][1].zero_()
        live["nested"].append("later")
        live["lr"] = 0.0
        snapshot.write(tmp_path)
        found = torch.load(tmp_path / "zero/a.pt", mmap=True, weights_only=True)
        assert_equal(found, states(scale))
        assert (tmp_path / "zero/a.pt").stat().st_size < 6000, "no storage is written twice, or whole for a view"
    assert found["module"]["a"].data_ptr() == found["module"]["same"].data_ptr(), "the shared tensor is one"


def test_memory_is_allocated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, allocate = list[int](), module.allocate
    monkeypatch.setattr(module, "allocate", lambda size, device: sizes.append(size) or allocate(size, device))
    snapshot = Snapshot(CPU, 2)
    for scale in (1.0, 2.0, 3.0):
        snapshot.create(None)
        for name in ("a.pt", "b.pt"):
            snapshot.save(states(scale), name)
    assert len(sizes) == 2


def test_with_too_little_host_memory_nothing_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run must not be killed for want of memory at its first checkpoint; it waits for the write instead."""
    monkeypatch.setattr(module, "available_bytes", lambda: 3000)
    for ranks, live in ((1, False), (50, True)):
        snapshot = Snapshot(CPU, ranks)
        snapshot.create(None)
        snapshot.save(states(1.0), "a.pt")
        assert snapshot.is_live == live
        snapshot.write(tmp_path)
        assert_equal(torch.load(tmp_path / "a.pt", weights_only=True), states(1.0))


def test_a_write_of_the_system_may_be_short() -> None:
    written = bytearray()

    def write(data: memoryview) -> int:
        written.extend(data[:3])
        return min(3, len(data))

    assert module._Pieces(write).write(b"0123456789") == 10
    assert written == b"0123456789"


def on_rank(root: Path) -> list[str]:
    """Take a snapshot, train on, write it, and load it into another engine; return what differs."""
    wrong = []
    for kind, stage in (("bf16 experts", 1), ("fp32", 2), ("bf16 tied", 3)):
        engine, folder = engine_of(config_of(kind, stage), seed=0), root / f"{kind} {stage}"
        train(engine, 2)
        whole, taken = gather(engine), engine.snapshot()
        train(engine, 1)
        taken.write(folder)
        dist.barrier()
        other = engine_of(config_of(kind, stage), seed=1)
        other.load(folder)
        try:
            assert_equal(gather(other), whole)
        except AssertionError as error:
            wrong.append(f"{kind} {stage}: {error}")
        if Path("zero").exists():
            wrong.append("DeepSpeed wrote to the working folder")
    return wrong


@pytest.mark.world
def test_training_goes_on_while_a_snapshot_is_written(tmp_path: Path) -> None:
    """If one tensor were not copied, the checkpoint would mix two steps, with hashes that match."""
    assert set(KINDS) >= {"bf16 experts", "fp32", "bf16 tied"}
    assert run_world(2, on_rank, tmp_path) == [[], []]
