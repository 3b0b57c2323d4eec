"""Blocks of several hosts: each is packed once, by its owner; a host that is late costs time and changes nothing."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from engine.config import schema
from engine.control.sockets import connected, reserved
from engine.data.blocks import peer_blocks, peers
from engine.data.blocks.blocks import BlockId, Range, Slice
from engine.data.blocks.local_blocks import LocalBlocks
from engine.data.blocks.peer_blocks import PeerBlocks
from engine.data.blocks.peers import Hosts, Peer, PeerServer
from engine.data.blocks.texts import Texts
from engine.data.sources import jsonl
from engine.data.sources.formats import FORMATS
from engine.errors import DataError
from tests.data.blocks.hosts import SECRET, several
from tests.data.blocks.loading import wait_until
from tests.refusals import refused


@pytest.fixture
def texts(tmp_path: Path, make_data: Callable[..., schema.Data], monkeypatch: pytest.MonkeyPatch) -> dict[str, Texts]:
    """A source of 24 blocks."""
    monkeypatch.setattr(jsonl, "_BLOCK_BYTES", 400)
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": f"{number:083}"}) for number in range(96)))
    data = make_data(tmp_path / "a.jsonl", format="jsonl", cache=str(tmp_path / "cache"))
    return {"web": Texts.of(data, FORMATS["jsonl"].blocks(data))}


def all_of(texts: dict[str, Texts]) -> list[BlockId]:
    return [BlockId(name, block) for name, one in texts.items() for block in range(len(one.blocks))]


def read_all(blocks: PeerBlocks, wanted: list[BlockId]) -> list[list[int]]:
    ranges = list[Range]()
    for block in wanted:
        for document, content in enumerate(blocks.lengths(block).hash().tolist()):
            ranges.append(Range(*block, document, 0, 99, content))
    return [one.tokens.tolist() for one in blocks.slices(ranges)]


def test_each_block_is_packed_by_one_host(texts: dict[str, Texts]) -> None:
    """All hosts agree on its owner, and all have some blocks; all read the same."""
    wanted = all_of(texts)
    expected = LocalBlocks(texts)
    documents = [
        expected.slices([Range(*block, document, 0, 99, content)])[0].tokens.tolist()
        for block in wanted
        for document, content in enumerate(expected.lengths(block).hash().tolist())
    ]
    with several(texts, 3, loaders=1) as hosts:
        for blocks in hosts.blocks:
            blocks.ask(wanted)
        for blocks in hosts.blocks:
            assert read_all(blocks, wanted) == documents
        assert len({tuple(blocks.owner(block) for block in wanted) for blocks in hosts.blocks}) == 1
        packed = Counter(name for number in range(3) for name in hosts.packed(number))
        assert len(packed) == len(wanted) == 24 and {*packed.values()} == {1}
        assert all(hosts.packed(number) for number in range(3))


def test_a_host_that_leaves_changes_the_owners_of_its_own_blocks_alone(texts: dict[str, Texts]) -> None:
    wanted = all_of(texts)
    with several(texts, 3) as hosts:
        before = [hosts.blocks[0].owner(block) for block in wanted]
    with several(texts, 2) as hosts:
        after = [hosts.blocks[0].owner(block) for block in wanted]
    gone = "cache 2"
    assert 0 < before.count(gone) < 20
    assert all(one == other for one, other in zip(before, after, strict=True) if one != gone)


def test_owners_of_all_blocks_are_not_kept(texts: dict[str, Texts], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_blocks, "_OWNERS", 3)
    wanted = all_of(texts)
    with several(texts, 2) as hosts:
        first, again = ([hosts.blocks[0].owner(block) for block in wanted] for _ in range(2))
        assert first == again and hosts.blocks[0].owner.cache_info().currsize == 3


def test_blocks_that_the_launcher_has_packed_belong_to_the_host_with_its_cache(texts: dict[str, Texts]) -> None:
    """Unless its cache is that of no host."""
    wanted = all_of(texts)
    placed = dict.fromkeys(wanted[::2], "cache 1") | {wanted[1]: "on a login node"}
    with several(texts, 3, placed=placed) as hosts:
        owners = {block: hosts.blocks[0].owner(block) for block in wanted}
    assert {owners[block] for block in wanted[::2]} == {"cache 1"} and owners[wanted[1]] in hosts.identities
    # Names of temporary folders decide, so one of the three may have none of the others.
    assert len({owners[block] for block in wanted[1::2]}) > 1


def ended(*_: Any) -> bytes:
    raise EOFError


def test_blocks_of_a_host_that_is_gone_are_packed_by_whoever_needs_them(
    texts: dict[str, Texts], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There is one message."""
    monkeypatch.setattr(peers, "_PAUSE_S", 1e9)
    wanted = all_of(texts)
    with several(texts, 2) as hosts:
        expected = read_all(hosts.blocks[1], wanted)
        PeerBlocks.close(hosts.blocks[1])
        monkeypatch.setattr(PeerServer, "_answer", ended)
        assert read_all(hosts.blocks[0], wanted) == expected
        assert len(hosts.packed(0)) == len(wanted)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("how", ["silent", "another secret"])
def test_a_host_that_does_not_answer_costs_its_limit_once(
    how: str, texts: dict[str, Texts], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is stopped accepts connections, and says nothing."""
    monkeypatch.setattr(peers, "_FIRST_S", 0.3)
    monkeypatch.setattr("engine.control.sockets._HANDSHAKE_S", 0.3)
    wanted = all_of(texts)
    if how == "another secret":
        with several(texts, 2, secrets=(SECRET, b"another")) as hosts:
            assert len(read_all(hosts.blocks[0], wanted)) == 96 and len(hosts.packed(0)) == 24
        return
    with socket.create_server(("127.0.0.1", 0)) as stopped, reserved("127.0.0.1") as own:
        place = own.getsockname()[:2]
        found = Hosts("here", *place, SECRET, {"there": stopped.getsockname()[:2]})
        blocks = PeerBlocks(texts, LocalBlocks(texts), found, {})
        assert len(read_all(blocks, wanted)) == 96
        assert len(caplog.records) == 1 and all(peer.is_late for peer in blocks._peers.values())
        blocks.close()


def test_a_file_that_is_gone_is_an_error_with_the_host_and_the_source_and_servers_go_on(
    texts: dict[str, Texts], tmp_path: Path
) -> None:
    wanted = all_of(texts)
    with several(texts, 2, loaders=1, named=True) as hosts:
        (tmp_path / "a.jsonl").rename(tmp_path / "gone")
        for blocks in hosts.blocks:
            blocks.ask(wanted)
            for block in wanted[:4]:
                with refused(DataError, str(tmp_path / "a.jsonl")) as problems:
                    blocks.lengths(block)
                own = hosts.identities[hosts.blocks.index(blocks)]
                assert "'web'" in problems[0].message and own in problems[0].message
        (tmp_path / "gone").rename(tmp_path / "a.jsonl")
        assert read_all(hosts.blocks[0], wanted) == read_all(hosts.blocks[1], wanted)
        assert not any(peer.is_late for blocks in hosts.blocks for peer in blocks._peers.values())


class Network:
    """What stands between hosts. A host is reached only while `open`; until `hangs` is set, no attempt returns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.hangs = False, threading.Event()
        self.hangs.set()
        self.times = list[float]()
        monkeypatch.setattr(peers, "connected", self.connected)

    def connected(self, *arguments: Any) -> int:
        self.times.append(time.monotonic())
        self.hangs.wait(20)
        if self.open:
            return connected(*arguments)
        raise TimeoutError("timed out")


def test_a_host_that_is_not_reached_is_waited_for_once(
    texts: dict[str, Texts], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Several hosts together: further attempts to reach them, however long each takes, delay no step."""
    monkeypatch.setattr(peers, "_FIRST_S", 0.3)
    monkeypatch.setattr(peers, "_PAUSE_S", 0.01)
    network, wanted = Network(monkeypatch), all_of(texts)
    with several(texts, 4) as hosts:
        blocks = hosts.blocks[0]
        assert sum(len(blocks.lengths(block)) for block in wanted) == 96
        wait_until(lambda: len(caplog.records) == 12)  # each host is late for each other one
        network.hangs.clear()
        began = time.monotonic()
        assert len(read_all(blocks, wanted)) == 96
        assert time.monotonic() - began < 10
        network.hangs.set()
    assert len(caplog.records) == 12


def test_attempts_to_reach_a_host_become_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_FIRST_S", 0.0)
    monkeypatch.setattr(peers, "_PAUSE_S", 0.02)
    monkeypatch.setattr(peers, "_LONGEST_S", 0.1)
    network = Network(monkeypatch)
    with closing(Peer(("127.0.0.1", 1), SECRET)):
        wait_until(lambda: len(network.times) >= 8)
    pauses = [later - earlier for earlier, later in pairwise(network.times)]
    assert all(pause >= least for pause, least in zip(pauses, [0.02, 0.04, 0.08, 0.1, 0.1, 0.1], strict=False))


def test_who_waits_for_the_first_connection_is_told_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    Network(monkeypatch)
    peer = Peer(("127.0.0.1", 1), SECRET)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(peer.lengths, [BlockId("web", 0)])
        wait_until(waiting.running)
        peer.close()
        assert waiting.result(timeout=peers._FIRST_S / 2) == {}


def test_a_host_that_is_back_is_asked_again(texts: dict[str, Texts], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_FIRST_S", 0.0)
    monkeypatch.setattr(peers, "_PAUSE_S", 0.01)
    network, wanted = Network(monkeypatch), all_of(texts)
    with several(texts, 2) as hosts:
        (peer,) = hosts.blocks[0]._peers.values()
        wait_until(lambda: peer.is_late)
        expected = read_all(hosts.blocks[1], wanted)
        network.open = True
        wait_until(lambda: not peer.is_late)
        assert read_all(hosts.blocks[0], wanted) == expected
        assert 0 < len(hosts.packed(0)) < 24


def test_hosts_are_asked_for_tokens_at_once(texts: dict[str, Texts], monkeypatch: pytest.MonkeyPatch) -> None:
    asked, slices = threading.Barrier(2), Peer.slices

    def together(peer: Peer, wanted: list[Range]) -> list[Slice | None]:
        asked.wait(20)
        return slices(peer, wanted)

    with several(texts, 3) as hosts:
        expected = [read_all(blocks, all_of(texts)) for blocks in hosts.blocks[1:]]
        monkeypatch.setattr(Peer, "slices", together)
        assert [read_all(hosts.blocks[0], all_of(texts))] * 2 == expected


def test_a_question_about_blocks_that_a_host_does_not_have_is_one_line(
    texts: dict[str, Texts], caplog: pytest.LogCaptureFixture
) -> None:
    """Such as a source of another config: no thread ends in a traceback."""
    with several(texts, 2) as hosts:
        (peer,) = hosts.blocks[0]._peers.values()
        assert peer.lengths([BlockId("code", 0)]) == {} and peer.is_late
        wait_until(lambda: len(caplog.records) == 2)
        assert sum("blocks that are not here" in record.getMessage() for record in caplog.records) == 1


def test_the_secret_is_not_shown(texts: dict[str, Texts]) -> None:
    assert "of the run" not in repr(Hosts("a", "127.0.0.1", 1, SECRET, {}))
