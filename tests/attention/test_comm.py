"""Ring traffic over gloo: what is sent, in which order it arrives, and what happens when a message does not come.

If these fail, a rank computes with the keys of another round or ring, or waits for a message that nobody sends.
"""

from __future__ import annotations

from datetime import timedelta
from queue import Empty
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine.attention.comm import Exchange, RingComm
from tests.attention.rings import ThreadComm, links_between
from tests.world import run_world

NOTHING = torch.empty(0)


def sends(x: Tensor, rank: int) -> Exchange:
    return Exchange(x, rank, NOTHING, rank)


def receives(size: int, rank: int, dtype: torch.dtype = torch.float32) -> Exchange:
    return Exchange(NOTHING, rank, torch.full((size,), -1, dtype=dtype), rank)


def around(comm: RingComm, rank: int, world: int) -> list[float]:
    """A ring of all ranks, as many rounds: each value comes home."""
    held = torch.tensor([float(rank)])
    seen = []
    for _ in range(world):
        incoming = torch.empty(1)
        comm.post([Exchange(held, (rank + 1) % world, incoming, (rank - 1) % world)]).wait()
        held = incoming
        seen.append(held.item())
    return seen


def in_order(comm: RingComm, rank: int) -> list[float]:
    """Rank 0 posts to rank 1 twice in a batch and once in the next; return what rank 1 sees."""
    seen = []
    for batch in ([10.0, 11.0], [12.0]) if rank < 2 else ():
        exchanges = [receives(1, 0) if rank else sends(torch.tensor([value]), 1) for value in batch]
        comm.post(exchanges).wait()
        seen += [exchange.receive.item() for exchange in exchanges if rank]
    return seen


def empty_beside_full(comm: RingComm, rank: int) -> list[float]:
    """Between ranks 0 and 1, an empty message of one ring stands before a full one of another: both sides skip it."""
    if rank == 0:
        comm.post([sends(NOTHING, 1), sends(torch.tensor([7.0, 8.0]), 1)]).wait()
    if rank == 1:
        exchanges = [receives(0, 0), receives(2, 0)]
        comm.post(exchanges).wait()
        return exchanges[1].receive.tolist()
    return []


def counted(group: dist.ProcessGroup, rank: int) -> int:
    """Three float32 and five bf16 go out; what comes in does not count."""
    comm, peer = RingComm(group), (rank + 1) % 3
    previous = (rank - 1) % 3
    comm.post(
        [
            Exchange(torch.zeros(3), peer, torch.empty(3), previous),
            Exchange(torch.zeros(5, dtype=torch.bfloat16), peer, torch.empty(5, dtype=torch.bfloat16), previous),
            Exchange(NOTHING, peer, NOTHING, previous),
        ]
    ).wait()
    return comm.bytes_sent


def counted_nothing(group: dist.ProcessGroup) -> int:
    comm = RingComm(group)
    comm.post([]).wait()
    comm.post([sends(NOTHING, 0), receives(0, 0)]).wait()
    return comm.bytes_sent


def meeting(group: dist.ProcessGroup, rank: int) -> list[Any]:
    """Ranks 0 and 1, and 1 and 2, meet: whom each rank sent to and received from in how many batches, and bytes sent.

    Rank 2 comes late and has its peers in another order; a message that a rank sends afterwards is not mixed up.
    """
    comm, batches, batched = RingComm(group), list[list[tuple[str, int]]](), dist.batch_isend_irecv

    def recorded(operations: list[dist.P2POp]) -> list[dist.Work]:
        batches.append(sorted((one.op.__name__, one.group_peer) for one in operations))
        return batched(operations)

    dist.batch_isend_irecv = recorded
    try:
        comm.meet({0: [1], 1: [2, 0], 2: [1]}[rank], torch.device("cpu"))
        comm.meet([], torch.device("cpu"))
    finally:
        dist.batch_isend_irecv = batched
    return [batches, comm.bytes_sent, around(comm, rank, 3)]


def missing(rank: int) -> str:
    """Rank 0 waits for a message that rank 1 never sends."""
    comm = RingComm(dist.new_group(backend="gloo", timeout=timedelta(seconds=0.5)))
    if rank == 0:
        with pytest.raises(RuntimeError) as caught:
            comm.post([receives(1, 1)]).wait()
        return str(caught.value)
    return ""


def results() -> dict[str, Any]:
    group, rank = dist.new_group(backend="gloo"), dist.get_rank()
    comm = RingComm(group)
    return {
        "around": around(comm, rank, 3),
        "in order": in_order(comm, rank),
        "empty": empty_beside_full(comm, rank),
        "bytes": counted(group, rank),
        "bytes of nothing": counted_nothing(group),
        "meeting": meeting(group, rank),
        "missing": missing(rank),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_world(3, results)


@pytest.mark.world
def test_values_travel_around_a_ring_and_come_home(ranks: list[dict[str, Any]]) -> None:
    assert [rank["around"] for rank in ranks] == [[2, 1, 0], [0, 2, 1], [1, 0, 2]]


@pytest.mark.world
def test_messages_between_two_ranks_arrive_in_the_order_of_posting(ranks: list[dict[str, Any]]) -> None:
    assert ranks[1]["in order"] == [10, 11, 12]


@pytest.mark.world
def test_both_sides_skip_an_empty_message(ranks: list[dict[str, Any]]) -> None:
    assert ranks[1]["empty"] == [7, 8]


@pytest.mark.world
def test_bytes_sent_are_counted(ranks: list[dict[str, Any]]) -> None:
    assert [rank["bytes"] for rank in ranks] == [3 * 4 + 5 * 2] * 3
    assert [rank["bytes of nothing"] for rank in ranks] == [0] * 3


@pytest.mark.world
def test_ranks_meet_in_one_batch_that_is_no_traffic(ranks: list[dict[str, Any]]) -> None:
    """Of several batches, one rank's second could wait for another's first."""
    first, second, third = (rank["meeting"] for rank in ranks)
    assert first[0] == third[0] == [[("irecv", 1), ("isend", 1)]]
    assert second[0] == [[("irecv", 0), ("irecv", 2), ("isend", 0), ("isend", 2)]]
    assert [rank["meeting"][1:] for rank in ranks] == [[0, [2, 1, 0]], [0, [0, 2, 1]], [0, [1, 0, 2]]]


@pytest.mark.world
def test_a_message_that_does_not_come_is_an_error(ranks: list[dict[str, Any]]) -> None:
    assert "Timed out" in ranks[0]["missing"]


class TestTransportOfTests:
    """The threads' transport stands for gloo in the sweeps: it must notice what a wrong executor would do."""

    def test_a_message_of_another_size_is_noticed(self) -> None:
        links = links_between(2)
        ThreadComm(0, links).post([sends(torch.zeros(2), 1)])
        with pytest.raises(AssertionError):
            ThreadComm(1, links).post([receives(3, 0)]).wait()

    def test_a_message_of_another_dtype_is_noticed(self) -> None:
        links = links_between(2)
        ThreadComm(0, links).post([sends(torch.zeros(2), 1)])
        with pytest.raises(AssertionError):
            ThreadComm(1, links).post([receives(2, 0, torch.bfloat16)]).wait()

    def test_a_missing_message_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tests.attention.rings.PATIENCE_S", 0.05)
        with pytest.raises(Empty):
            ThreadComm(1, links_between(2)).post([receives(1, 0)]).wait()

    def test_a_buffer_that_changes_under_way_is_noticed(self) -> None:
        buffer = torch.zeros(2)
        pending = ThreadComm(0, links_between(2)).post([sends(buffer, 1)])
        buffer += 1
        with pytest.raises(AssertionError):
            pending.wait()

    def test_a_buffer_is_not_there_before_it_has_come(self) -> None:
        exchange = receives(2, 0)
        ThreadComm(1, links_between(2)).post([exchange])
        assert exchange.receive.isnan().all()
