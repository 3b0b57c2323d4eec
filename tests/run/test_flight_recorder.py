"""The operation of NCCL that cannot end is named, with the ranks that are not in it."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from engine.run.flight_recorder import first_mismatch
from engine.run.folder import RunFolder
from tests.run.records import operation, write

WORLD = {"0": [0, 1, 2, 3]}
RINGS = {**WORLD, "7": [1, 3]}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def test_a_collective_that_a_rank_has_not_begun(folder: RunFolder) -> None:
    before = operation("0", 1, "all_reduce", 10, ended=True)
    for rank in (0, 1, 3):
        write(folder, rank, WORLD, before, operation("0", 2, "_reduce_scatter_base", 20 + rank))
    write(folder, 2, WORLD, before)
    said = "collective 2 of the group of ranks 0, 1, 2, 3: ranks 0, 1, 3 wait in _reduce_scatter_base [[8]] for rank 2"
    assert first_mismatch(folder, 4) == said
    folder.nccl_record(2).unlink()
    assert str(first_mismatch(folder, 4)).endswith("; there is no record of rank 2")


@pytest.mark.parametrize(
    ("what", "sizes", "said"),
    [
        ("all_gather", (8,), "rank 1 in all_gather [[8]]; ranks 0, 2, 3 in all_reduce [[8]]"),
        ("all_reduce", (4,), "rank 1 in all_reduce [[4]]; ranks 0, 2, 3 in all_reduce [[8]]"),
    ],
)
def test_different_collectives(folder: RunFolder, what: str, sizes: tuple[int, ...], said: str) -> None:
    for rank in range(4):
        one = operation("0", 5, what, 9, sizes=sizes) if rank == 1 else operation("0", 5, "all_reduce", 9)
        write(folder, rank, WORLD, one)
    assert str(first_mismatch(folder, 4)).endswith(f": {said}")


def test_ranks_may_give_other_sizes_where_nccl_allows_it(folder: RunFolder) -> None:
    for rank in range(4):
        write(folder, rank, WORLD, operation("0", 5, "all_to_all", rank, ended=True, sizes=(rank,)))
    assert first_mismatch(folder, 4) is None
    write(folder, 3, WORLD, operation("0", 5, "all_to_all", 3, sizes=(3,)))
    assert str(first_mismatch(folder, 4)).endswith("all are in all_to_all, which has not ended")


def test_a_message_that_its_peer_does_not_send(folder: RunFolder) -> None:
    """Numbers in messages are those within the group: 0 is rank 1, 1 is rank 3."""
    batch = operation("7", 0, "coalesced", 9)
    write(folder, 1, RINGS, operation("7", 0, "send 0->1", 8), operation("7", 0, "recv 0<-1", 9), batch)
    write(folder, 3, RINGS, operation("7", 0, "recv 1<-0", 10), operation("7", 0, "send 1->0", 5, ended=True))
    for rank in (0, 2):
        write(folder, rank, WORLD, operation("0", 4, "all_reduce", 99))
    said = "recv of rank 1 from rank 3 in the group of ranks 1, 3: which is in no send"
    assert first_mismatch(folder, 4) == said, "it was begun before the collective that waits for both"
    write(folder, 3, RINGS, operation("7", 0, "recv 1<-0", 10), operation("7", 0, "send 1->0", 11))
    assert "collective 4" in str(first_mismatch(folder, 4)), "the messages of both are there, so they do not wait"


def test_oldest_operations_that_a_full_record_has_lost_are_not_missed(folder: RunFolder) -> None:
    pair = {"0": [0, 1]}
    write(folder, 0, pair, *(operation("0", number, "all_reduce", number, number < 9) for number in range(1, 10)))
    write(folder, 1, pair, *(operation("0", number, "all_reduce", number, number < 9) for number in range(4, 10)))
    assert str(first_mismatch(folder, 2)).startswith("collective 9 ")


def test_what_is_no_record_says_nothing_and_executes_nothing(folder: RunFolder) -> None:
    assert first_mismatch(folder, 2) is None
    folder.logs.mkdir()

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(folder.root / "made"),)

    for content in (
        b"",
        b"x",
        pickle.dumps([1]),
        pickle.dumps({"entries": [{}], "pg_config": {}}),
        pickle.dumps(Evil()),
    ):
        folder.nccl_record(0).write_bytes(content)
        assert first_mismatch(folder, 1) is None
    assert not (folder.root / "made").exists()


def test_a_record_of_pytorch_is_understood(folder: RunFolder) -> None:
    """gloo records its operations too, but neither the ranks of a group nor what has ended."""
    import torch.distributed as dist
    from torch import ones
    from torch._C._distributed_c10d import _dump_fr_trace

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(ones(8))
        record = pickle.loads(_dump_fr_trace())
    finally:
        dist.destroy_process_group()
    assert record["entries"][-1].keys() >= operation("0", 1, "all_reduce", 0).keys()
    record["pg_config"] = {record["entries"][-1]["process_group"][0]: {"ranks": "[0, 1]"}}
    folder.logs.mkdir()
    folder.nccl_record(0).write_bytes(pickle.dumps(record))
    write(folder, 1, {record["entries"][-1]["process_group"][0]: [0, 1]})
    assert "rank 0 waits in all_reduce [[8]] for rank 1" in str(first_mismatch(folder, 2))
