"""Loaders take blocks in the order of need; each block once, unless who takes it is lost."""

from __future__ import annotations

import random

from engine.data.blocks.blocks import BlockId
from engine.remote.queue import Queue

A, B, C, D = (BlockId("source", number) for number in range(4))


def missing_everywhere(queue: Queue, blocks: list[BlockId]) -> None:
    for host in queue.hosts:
        queue.missing_on(host, blocks)


def test_blocks_are_looked_for_on_all_hosts_before_one_packs_them() -> None:
    queue = Queue({"host-0": 1, "host-1": 1})
    assert queue.ask([A, B]) == [A, B]
    assert queue.take() is None
    queue.missing_on("host-0", [A, B])
    assert queue.take() is None
    queue.missing_on("host-1", [A])
    assert queue.take() == ("host-0", A)
    queue.found(B)
    assert queue.take() is None, "it was there"
    assert queue.ask([B, A]) == [B], "A is being packed"


def test_free_loaders_take_the_first_block_whatever_its_host() -> None:
    queue = Queue({"host-0": 1, "host-1": 2})
    missing_everywhere(queue, queue.ask([A, B, C, D]))
    taken = [queue.take() for _ in range(4)]
    assert [one and one[1] for one in taken] == [A, B, C, None]
    assert sorted(one[0] for one in taken if one) == ["host-0", "host-1", "host-1"]
    queue.found(B)
    assert queue.take() == ("host-0", D)


def test_another_order_replaces_the_one_before() -> None:
    queue = Queue({"host-0": 1})
    missing_everywhere(queue, queue.ask([A, B, C]))
    assert queue.ask([C, A]) == []
    assert queue.take() == ("host-0", C)
    queue.found(C)
    assert queue.take() == ("host-0", A)
    queue.found(A)
    assert queue.take() is None, "B is not asked for any more"


def test_how_many_blocks_wait_and_are_being_packed() -> None:
    queue = Queue({"host-0": 1, "host-1": 1})
    missing_everywhere(queue, queue.ask([A, B, C]))
    queue.ask([A, B, C, D])
    assert queue.queued() == (3, 0), "D may be packed on a host"
    queue.take()
    queue.missing_on("host-0", [D])
    queue.missing_on("host-1", [D])
    assert queue.queued() == (3, 1)
    queue.take()
    queue.found(A)
    queue.lose("host-0" if queue._packing[B] == "host-0" else "host-1")
    assert queue.queued() == (3, 0), "what a lost host was packing waits again"


def test_loaders_that_are_too_many_take_no_other_block() -> None:
    queue = Queue({"host-0": 1, "host-1": 1})
    missing_everywhere(queue, queue.ask([A, B, C, D]))
    queue.resize({"host-0": 2, "host-1": 1})
    assert [one and one[1] for one in (queue.take(), queue.take(), queue.take(), queue.take())] == [A, B, C, None]
    assert queue.missing() == {A, B, C, D}
    queue.resize({"host-0": 1, "host-1": 1})
    assert queue.take() is None
    queue.found(A)
    queue.found(B)
    queue.found(C)
    assert queue.take() is not None and queue.missing() == {D}


def test_what_is_needed_now_comes_first() -> None:
    queue = Queue({"host-0": 1})
    missing_everywhere(queue, queue.ask([A, B]))
    assert queue.first(C) == [C] and queue.first(B) == []
    missing_everywhere(queue, [C])
    assert queue.take() == ("host-0", B)
    queue.found(B)
    assert queue.take() == ("host-0", C) and queue.first(C) == []


def test_blocks_of_a_lost_host_wait_before_all_others() -> None:
    queue = Queue({"host-0": 1, "host-1": 1})
    missing_everywhere(queue, queue.ask([A, B, C]))
    taken = {one[0]: one[1] for one in (queue.take(), queue.take()) if one}
    queue.ask([C, D])
    queue.missing_on("host-1", [D])
    queue.lose("host-0")
    assert queue.hosts == ["host-1"]
    queue.found(taken["host-1"])
    assert queue.take() == ("host-1", taken["host-0"])
    queue.found(taken["host-0"])
    assert queue.take() == ("host-1", C)
    queue.found(C)
    assert queue.take() == ("host-1", D), "the lost host is not waited for"


def test_any_order_of_events_packs_each_block_once() -> None:
    for seed in range(50):
        drawn, queue = random.Random(seed), Queue({"host-0": 2, "host-1": 1})
        wanted = [BlockId("source", number) for number in range(12)]
        packed, packing = list[BlockId](), list[BlockId]()
        missing_everywhere(queue, queue.ask(wanted))
        while len(packed) < len(wanted):
            if drawn.random() < 0.2:
                rest = [block for block in wanted if block not in packed]
                missing_everywhere(queue, queue.ask(drawn.sample(rest, len(rest))))
            if drawn.random() < 0.1:
                missing_everywhere(queue, queue.first(drawn.choice([one for one in wanted if one not in packed])))
            while (pair := queue.take()) is not None:
                packing.append(pair[1])
            assert 0 < len(packing) <= 3
            packed.append(packing.pop(drawn.randrange(len(packing))))
            queue.found(packed[-1])
        assert sorted(packed) == wanted and not packing
