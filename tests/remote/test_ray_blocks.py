"""Blocks of hosts, over a wire in this process on which a test answers, or whose hosts pack at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from engine.data.blocks import known
from engine.data.blocks.blocks import BlockId, Range
from engine.data.blocks.known import KnownLengths
from engine.data.blocks.local_blocks import LocalBlocks
from engine.data.blocks.served import lengths_payload
from engine.data.blocks.texts import Texts
from engine.data.blocks.work import Cost
from engine.data.parts import Tokens
from engine.errors import DataError
from engine.remote import ray_blocks
from engine.remote.caller import Answer, Caller
from engine.remote.ray_blocks import RayBlocks
from engine.remote.roles import Packer
from engine.remote.slices import HostBlocks
from engine.remote.view import Member, View
from tests.data.noted import Noted, starts
from tests.remote.in_memory import MemoryBoard, view_of

HOSTS = ("host-0", "host-1")


@dataclass
class Hosts:
    """Hosts that answer at once, except calls of methods that are held."""

    packers: Mapping[str, Packer]
    calls: list[tuple[str, str]] = field(default_factory=list)
    held: set[str] = field(default_factory=set)
    waiting: list[Callable[[], None]] = field(default_factory=list)

    def send(
        self, member: Member, method: str, arguments: tuple[Any, ...], answered: Callable[[Answer | None], None]
    ) -> None:
        role = member.actor.rpartition("-")[0].replace("_", "-")
        self.calls.append((role, method))

        def answer() -> None:
            try:
                answered(Answer(member.epoch, getattr(self.packers[role], method)(*arguments)))
            except DataError as error:
                answered(Answer(member.epoch, None, error))

        if method in self.held:
            self.waiting.append(answer)
        else:
            answer()

    def release(self) -> None:
        self.held.clear()
        waiting, self.waiting = self.waiting, []
        for answer in waiting:
            answer()


@dataclass
class Rig:
    """Five blocks on two hosts with one loader each."""

    noted: list[Noted]
    hosts: Hosts
    board: MemoryBoard
    caller: Caller
    blocks: RayBlocks
    local: Mapping[str, LocalBlocks]

    def ids(self, *numbers: int) -> list[BlockId]:
        return [BlockId("source", number) for number in numbers]

    def packed(self) -> list[int]:
        return [number for number, block in enumerate(self.noted) if starts(block)]

    def range_of(self, number: int) -> Range:
        return Range("source", number, 0, 0, 9, self.blocks.lengths(BlockId("source", number)).hash()[0].item())


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(Caller, "_follow", lambda self: None)
    noted = [Noted.write(tmp_path / f"{number}", [b"text %d" % number, b"more"]) for number in range(5)]
    made = {host: Texts("place", Tokens("bytes", None, None), tmp_path / host, noted) for host in HOSTS}
    local = {host: LocalBlocks({"source": texts}) for host, texts in made.items()}
    hosts, board = Hosts({host: Packer(blocks) for host, blocks in local.items()}), MemoryBoard()
    caller = Caller(board, hosts)
    board.publish(view_of(1, host_0=1, host_1=2, planner=3))
    caller.look()
    blocks = RayBlocks({"source": made["host-0"]}, caller, HOSTS, 2)
    yield Rig(noted, hosts, board, caller, blocks, local)
    caller.close()


def test_hosts_pack_what_none_has_in_the_order_of_need(rig: Rig) -> None:
    rig.local["host-1"].lengths(BlockId("source", 3))
    rig.hosts.held.add("pack")
    rig.blocks.ask(rig.ids(2, 3, 0, 1))
    assert rig.hosts.calls == [(host, method) for method in ("lengths", "pack") for host in HOSTS]
    assert rig.packed() == [3] and rig.blocks.owners == {BlockId("source", 3): "host-1"}
    rig.hosts.held.discard("pack")
    first = rig.hosts.waiting.pop(0)
    first()
    assert rig.packed() == [0, 1, 2, 3] or rig.packed() == [1, 2, 3], "who is free takes the next"
    rig.hosts.release()
    assert rig.packed() == [0, 1, 2, 3] and [starts(block) for block in rig.noted] == [1, 1, 1, 1, 0]


def test_lengths_wait_for_the_host_that_packs(rig: Rig) -> None:
    rig.hosts.held.add("pack")
    found = list[int]()
    reader = threading.Thread(target=lambda: found.append(len(rig.blocks.lengths(BlockId("source", 4)))))
    reader.start()
    while not rig.hosts.waiting:
        pass
    assert reader.is_alive()
    rig.hosts.release()
    reader.join(10)
    assert found == [2] and rig.blocks.lengths(BlockId("source", 4)).inputs().tolist() == [7, 5]
    assert rig.blocks.tokens == 0 < rig.blocks.received


def test_questions_about_packed_blocks_do_not_wait_for_packing(rig: Rig) -> None:
    """A planner that starts anew asks for all blocks in one call of each host, while they pack others."""
    for number in (0, 1, 2):
        rig.local["host-0"].lengths(BlockId("source", number))
    rig.hosts.held.add("pack")
    rig.blocks.ask(rig.ids(3, 0, 1, 2))
    assert [len(rig.blocks.lengths(block)) for block in rig.ids(0, 1, 2)] == [2, 2, 2]
    assert [method for _, method in rig.hosts.calls].count("lengths") == 2


def test_a_block_whose_lengths_are_given_up_at_once_has_been_answered(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planner that starts again may get more lengths in one answer than it keeps; the first go before others come."""
    monkeypatch.setattr(known, "_MOST", 8)
    one = KnownLengths.of(rig.local["host-0"].lengths(BlockId("source", 0)))
    every = rig.ids(*range(5000))
    monkeypatch.setattr(
        rig.hosts.packers["host-0"], "lengths", lambda asked: lengths_payload(dict.fromkeys(asked, one))
    )
    rig.hosts.held.add("lengths")
    rig.blocks.ask(every)
    found = list[int]()
    reader = threading.Thread(target=lambda: found.append(len(rig.blocks.lengths(every[0]))), daemon=True)
    reader.start()
    while every[0] != next(iter(rig.blocks._queue._waiting)) or not rig.blocks._awaited:
        pass
    rig.hosts.release()
    reader.join(10)
    assert found == [2] and not rig.blocks.missing() and not rig.blocks._awaited
    assert len(rig.blocks.lengths(every[1])) == 2, "it is asked for again"


def test_hosts_divide_the_loaders_and_take_as_many_blocks(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[tuple[str, int]]()
    for host, blocks in rig.local.items():
        monkeypatch.setattr(blocks, "resize", lambda loaders, host=host: told.append((host, loaders)))
        monkeypatch.setattr(blocks, "running", lambda: [("source", 1.5)])
    rig.hosts.held.add("pack")
    rig.blocks.resize(3)
    rig.blocks.ask(rig.ids(0, 1, 2, 3))
    assert told == [("host-0", 2), ("host-1", 1)] and rig.blocks.loaders == 3
    assert [host for host, method in rig.hosts.calls if method == "pack"].count("host-0") == 2
    assert rig.blocks.running() == [("source", 1.5)] * 2 and rig.blocks.missing() == {*rig.ids(0, 1, 2, 3)}
    rig.blocks.resize(1)
    assert told[-2:] == [("host-0", 1), ("host-1", 1)], "each has one"
    rig.hosts.release()
    assert not rig.blocks.missing()


def test_the_last_number_of_loaders_is_that_of_a_host_whatever_order_its_calls_run_in(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[tuple[str, int]]()
    for host, blocks in rig.local.items():
        monkeypatch.setattr(blocks, "resize", lambda loaders, host=host: told.append((host, loaders)))
    rig.hosts.held.add("resize")
    for loaders in (8, 6, 4):
        rig.blocks.resize(loaders)
    while rig.hosts.waiting:
        rig.hosts.waiting.pop()()
    assert dict(told) == {"host-0": 2, "host-1": 2}
    told.clear()
    rig.hosts.release()
    rig.blocks.resize(4)
    assert dict(told) == {"host-0": 2, "host-1": 2}, "in each step: a host may have been replaced"


def test_the_hosts_of_blocks_that_were_not_used_for_the_longest_time_are_forgotten(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_blocks, "_OWNERS", 2)
    wanted = [rig.range_of(number) for number in (0, 1)]
    rig.blocks.lengths(BlockId("source", 0))
    rig.range_of(2)
    assert list(rig.blocks.owners) == rig.ids(0, 2)
    assert len(rig.blocks.slices(wanted)) == 2, "they are asked for again"
    assert rig.packed() == [0, 1, 2] and max(map(starts, rig.noted)) == 1


def test_costs_of_all_hosts_are_added(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds, blocks in enumerate(rig.local.values(), 1):
        monkeypatch.setattr(blocks, "packed", partial(dict, source=Cost(1, seconds=seconds)))
    rig.hosts.held.add("pack")
    rig.blocks.ask(rig.ids(0, 1))
    rig.hosts.release()
    assert rig.blocks.packed() == {"source": Cost(2, seconds=3)} and rig.blocks.packed() == {}


def test_tokens_come_from_the_host_that_has_packed(rig: Rig) -> None:
    wanted = [rig.range_of(number) for number in (0, 1, 2)]
    before = len(rig.hosts.calls)
    expected = rig.local["host-0"].slices(wanted)
    found = rig.blocks.slices([*wanted, wanted[0]])
    assert [one.tokens.tolist() for one in found] == [one.tokens.tolist() for one in [*expected, expected[0]]]
    assert {method for _, method in rig.hosts.calls[before:]} == {"slices"}
    assert rig.blocks.tokens == sum(len(one.tokens) for one in found)


def test_a_block_that_was_evicted_is_packed_again_by_its_host(rig: Rig, tmp_path: Path) -> None:
    wanted = rig.range_of(0)
    owner = rig.blocks.owners[BlockId("source", 0)]
    for path in (tmp_path / owner).rglob("*.*"):
        if path.is_file():
            path.unlink()
    (found,) = rig.blocks.slices([wanted])
    assert found.tokens.tolist() == [*b"text 0", *found.tokens.tolist()[6:]][: len(found.tokens)] or len(found.tokens)
    assert (owner, "read") in rig.hosts.calls


def test_another_host_packs_what_a_lost_one_was_packing(rig: Rig) -> None:
    rig.hosts.held.add("pack")
    rig.blocks.ask(rig.ids(0, 1))
    rig.hosts.held.clear()
    assert rig.board.publish(View(2, 3, {**view_of(1, host_1=2, planner=3).members}))
    rig.caller.look()
    waiting, rig.hosts.waiting = rig.hosts.waiting, []
    for answer in waiting:  # also the late one of the lost host
        answer()
    assert {rig.blocks.owners[block] for block in rig.ids(0, 1)} == {"host-1"} and rig.caller.refused == 1


def test_any_number_of_hosts_may_be_lost_at_once(rig: Rig) -> None:
    """Their calls are answered at once, one below the other."""
    hosts = [f"host-{number}" for number in reversed(range(2000))]
    blocks = RayBlocks({"source": rig.local["host-0"]._texts["source"]}, rig.caller, hosts, len(hosts))
    assert [len(blocks.lengths(block)) for block in rig.ids(*range(5))] == [2] * 5
    assert set(blocks.owners.values()) <= set(HOSTS)


def test_a_host_reads_its_own_blocks_itself(rig: Rig) -> None:
    """And those of others from them; if one is lost, it packs its blocks."""
    wanted = [rig.range_of(number) for number in (0, 1)]
    blocks = HostBlocks(rig.local["host-0"], rig.caller, "host-0")
    blocks.owners = {BlockId("source", 0): "host-0", BlockId("source", 1): "host-1"}
    before = len(rig.hosts.calls)
    found = blocks.slices(wanted)
    assert all(role == "host-1" for role, _ in rig.hosts.calls[before:])
    assert blocks.tokens == sum(len(one.tokens) for one in found) > 0
    blocks.owners = dict.fromkeys(blocks.owners, "host-7")
    again = blocks.slices(wanted)
    assert [one.tokens.tolist() for one in again] == [one.tokens.tolist() for one in found]


def test_an_error_is_one_of_each_call(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after it was asked for ahead, when no one waits for it."""
    packer = cast(Any, rig.hosts.packers["host-0"])
    for one in rig.hosts.packers.values():
        monkeypatch.setattr(one, "pack", lambda block: (_ for _ in ()).throw(DataError("cannot be used")))
    rig.blocks.ask(rig.ids(0, 1))
    for _ in range(2):
        with pytest.raises(DataError):
            rig.blocks.lengths(BlockId("source", 0))
    monkeypatch.undo()
    assert packer is not None and len(rig.blocks.lengths(BlockId("source", 0))) == 2
