"""A snapshot does not change while training goes on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from engine.fit.estimate import copy_bytes
from engine.job import Job
from engine.run.checkpoints import Range
from engine.zero import part
from engine.zero import snapshot as module
from engine.zero.snapshot import Snapshot
from tests.run.damage import Together
from tests.world import run_world
from tests.zero.engines import KINDS, config_of, differences, engine_of, gather, train
from tests.zero.saving import save_taken

CPU = torch.device("cpu")


def states(scale: float) -> dict[str, Any]:
    flat = scale * torch.arange(24.0)
    return {
        "module": OrderedDict(a=flat[:6].view(2, 3), same=flat[:6].view(2, 3), b=flat[6:].view(6, 3).T),
        "nested": [{"x": (flat[3:4].bfloat16(), torch.tensor(7), torch.empty(0, 5))}, "text"],
        "lr": scale,
        "scaler": SimpleNamespace(scale=scale, seen=[flat[:2]]),
    }


def alone(value: Any) -> dict[int, Any]:
    """`Share` of the only rank of a node."""
    return {0: value}


def load(folder: Path, name: str, written: Iterable[Range]) -> Any:
    """Load the states of a file from the only range that a snapshot has written."""
    with torch.serialization.safe_globals([SimpleNamespace]):
        (one,) = written
        return part.read(folder / one.file, one.start, one.stop, lambda file: torch.load(file, weights_only=True))[name]


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
    elif isinstance(expected, SimpleNamespace):
        assert_equal(vars(found), vars(expected))
    else:
        assert found == expected


def test_states_are_written_as_they_were_when_they_were_copied(tmp_path: Path) -> None:
    snapshot = Snapshot(CPU, 2, 0)
    for scale in (1.0, 3.0):  # the second time, in the same memory
        snapshot.create(None)
        live = states(scale)
        snapshot.save(live, "./zero/a.pt")
        live["module"]["a"].zero_()
        live["nested"][0]["x"][1].zero_()
        live["nested"].append("later")
        live["lr"] = 0.0
        live["scaler"].scale, live["scaler"].seen[0][0] = 0.0, 9.0
        found = load(tmp_path, "zero/a.pt", written := list(snapshot.write_each(tmp_path, alone)))
        assert_equal(found, states(scale))
        assert written == [Range("zero/ranks-00000-00000.states", 0, written[0].stop)]
        assert written[0].stop <= 8192, "no tensor is written twice, or whole for a view"
    assert found["module"]["a"].data_ptr() == found["module"]["same"].data_ptr(), "the shared tensor is one"


def test_memory_is_allocated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, allocate = list[int](), module.allocate
    monkeypatch.setattr(module, "allocate", lambda size, device: sizes.append(size) or allocate(size, device))
    snapshot = Snapshot(CPU, 2, 0)
    for scale in (1.0, 2.0, 3.0):
        snapshot.create(None)
        for name in ("a.pt", "b.pt"):
            snapshot.save(states(scale), name)
    assert len(sizes) == 2


@pytest.mark.parametrize("available", [10**6, 3000])
def test_memory_is_reserved_before_the_first_copy(available: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_bytes", lambda: available)
    monkeypatch.setattr(module, "allocate", allocated := Mock(side_effect=module.allocate))
    snapshot = Snapshot(CPU, 50, 0)
    snapshot.copies = False
    snapshot.create(None)
    snapshot.save(states(1.0), "a.pt")
    snapshot.reserve()
    assert not snapshot._files, "nothing is left to write"
    snapshot.copies = True
    snapshot.create(None)
    before = allocated.call_count
    snapshot.save(states(1.0), "a.pt")
    assert (before, allocated.call_count) == ((1, 1) if available > 3000 else (0, 0))
    assert bool(snapshot.short) == (available == 3000)


@pytest.mark.parametrize(("ranks", "copies"), [(1, True), (50, True), (1, False)])
def test_with_too_little_host_memory_nothing_is_copied(
    ranks: int, copies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run must not be killed for want of memory at its first checkpoint; it waits for the write instead."""
    monkeypatch.setattr(module, "available_bytes", lambda: 3000)
    monkeypatch.setattr(module, "allocate", allocated := Mock(side_effect=module.allocate))
    snapshot = Snapshot(CPU, ranks, 0)
    snapshot.copies = copies
    snapshot.create(None)
    snapshot.save(states(1.0), "a.pt")
    assert bool(snapshot.short) == (ranks == 50)
    assert allocated.call_count == (ranks == 1 and copies)
    assert_equal(load(tmp_path, "a.pt", snapshot.write_each(tmp_path, alone)), states(1.0))
    monkeypatch.setattr(module, "available_bytes", lambda: 10**6)  # memory has become free
    snapshot.create(None)
    snapshot.save(states(2.0), "a.pt")
    assert snapshot.short == 0
    assert_equal(load(tmp_path, "a.pt", snapshot.write_each(tmp_path, alone)), states(2.0))


def test_a_write_of_the_system_may_be_short(tmp_path: Path) -> None:
    written, encoded = bytearray(), part.Encoded({"a": states(1.0)})

    def write(data: memoryview) -> int:
        written.extend(data[:1000])
        return min(1000, len(data))

    for piece in encoded.pieces():
        module.write_all(write, piece)
    assert len(written) == encoded.size and encoded.size % 4096 == 0
    (tmp_path / "a").write_bytes(written)
    assert_equal(load(tmp_path, "a", [Range("a", 0, len(written))]), states(1.0))


@pytest.mark.parametrize("ranks", [[0], [8, 9, 10]])
def test_ranks_of_a_node_write_one_file_at_once(ranks: list[int], tmp_path: Path) -> None:
    """Each at its offset, whoever is first, and no page has bytes of two ranks."""
    together, found = Together(len(ranks)), dict[int, list[Range]]()

    def on_rank(rank: int) -> None:
        snapshot = Snapshot(CPU, 3, rank)
        snapshot.create(None)
        snapshot.save(states(float(rank)) | {"more": torch.full((1000 * rank,), rank)}, "a.pt")
        found[rank] = list(snapshot.write_each(tmp_path, partial(together.of(rank).share, "step")))

    threads = [Thread(target=on_rank, args=(rank,)) for rank in reversed(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    (path,) = (tmp_path / "zero").iterdir()
    assert path.name == f"ranks-{ranks[0]:05d}-{ranks[-1]:05d}.states"
    ends = [0, *(found[rank][0].stop for rank in ranks)]
    assert [found[rank][0].start for rank in ranks] == ends[:-1] and ends[-1] == path.stat().st_size
    assert not any(end % 4096 for end in ends)
    for rank in ranks:
        read = load(tmp_path, "a.pt", found[rank])
        assert torch.equal(read.pop("more"), torch.full((1000 * rank,), rank))
        assert_equal(read, states(float(rank)))
        assert read["module"]["a"].data_ptr() % 64 == 0


def test_bytes_that_are_no_part_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(8192))
    for start, stop in ((0, 4096), (4096, 8192), (4096, 16384)):
        with pytest.raises(ValueError, match=r"part|length"):
            load(tmp_path, "a", [Range("a", start, stop)])


CASES = [("bf16 experts", 1, ""), ("fp32", 2, ""), ("bf16 tied", 3, "")]
CASES += [("bf16 tied", 3, "zero.weights_on_host=true")]
CASES += [(kind, stage, "optimizer.on_host=true") for stage in (1, 2, 3) for kind in ("fp32", "bf16 tied")]


def on_rank(root: Path) -> list[str]:
    """Take a snapshot, train on, write it, and load it into another engine; return what differs."""
    wrong = []
    for kind, stage, more in CASES:
        config = config_of(kind, stage, *filter(None, [more]))
        engine, folder = engine_of(config, seed=0), root / f"{kind} {stage} {more}"
        train(engine, 1)
        engine.reserve_snapshot()
        train(engine, 1)
        whole = gather(engine)
        engine._snapshot._reserving.join()  # type: ignore[union-attr]
        reserved = dict(engine._snapshot._memory)
        taken = engine.snapshot()
        if reserved.keys() != taken._memory.keys() or any(
            taken._memory[name] is not reserved[name] for name in reserved
        ):
            wrong.append(f"{folder.name}: the first copy allocates memory")
        train(engine, 1)
        written = sum(one.stop - one.start for one in save_taken(taken, folder))
        other = engine_of(config, seed=1)
        other.load(folder)
        wrong += [f"{folder.name}: {name}" for name in differences(gather(other), whole)]
        copied = sum(len(memory) for memory in taken._memory.values())
        needs = copy_bytes(Job(config))
        if dist.get_rank() == 0 and not (copied <= needs * 1.15 and needs <= copied * 1.15 and copied <= written):
            wrong.append(f"{folder.name}: {copied} bytes are copied, {needs} estimated, and {written} written")
        if Path("zero").exists():
            wrong.append("DeepSpeed wrote to the working folder")
    return wrong


@pytest.mark.world
def test_training_goes_on_while_a_snapshot_is_written(tmp_path: Path) -> None:
    """If one tensor were not copied, the checkpoint would mix two steps, with hashes that match."""
    assert {kind for kind, _, _ in CASES} <= KINDS.keys()
    assert run_world(2, on_rank, tmp_path) == [[], []]
