"""Messages arrive whole and in order, whatever the sizes of the pieces in which they are read."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.control.link import RANK_LINK, Link
from engine.control.protocol import Alive, Answer, Failed, Hello, Message, ProtocolError, Stop, line_of

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    one, other = (end.detach() for end in socket.socketpair())
    links = Link(one, one), Link(other, other)
    yield links
    for link in links:
        link.close()


@given(st.lists(st.builds(Answer, st.integers(), VALUES), min_size=1, max_size=5), st.data())
def test_messages_arrive_whole_and_in_order(sent: list[Answer], data: st.DataObject) -> None:
    """Also those that a line break within a text, or a piece that ends within a character, could tear."""
    stream = b"".join(map(line_of, sent))
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=6).map(sorted))
    reads, writes = os.pipe()
    link, found = Link(reads, writes), list[Message]()
    try:
        for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            if end > start:
                os.write(writes, stream[start:end])
                found += link.receive()
    finally:
        link.close()
    assert found == sent


def test_large_messages_of_several_threads_do_not_mix(ends: tuple[Link, Link]) -> None:
    here, there = ends
    texts = [str(number) * 300_000 for number in range(4)]
    threads = [threading.Thread(target=here.send, args=[Failed(0, text)]) for text in texts]
    for thread in threads:
        thread.start()
    found = list[str]()
    while len(found) < len(texts):
        found += [message.why for message in there.receive() if isinstance(message, Failed)]
    for thread in threads:
        thread.join()
    assert sorted(found) == texts


def test_what_is_no_message_is_skipped(ends: tuple[Link, Link]) -> None:
    """The shell of another host may greet."""
    here, there = ends
    os.write(here.fileno(), b'Welcome to gpu-a!\n[1, 2]\n\xff\n"text"\n')
    here.send(Hello())
    assert there.receive() == [Hello()]


def test_what_this_version_does_not_know_is_an_error(ends: tuple[Link, Link]) -> None:
    here, there = ends
    os.write(here.fileno(), line_of(Alive()) + b'{"dance": {}}\n')
    with pytest.raises(ProtocolError):
        there.receive()


def test_the_end_of_the_other_side_is_noticed() -> None:
    one, other = (end.detach() for end in socket.socketpair())
    here, there = Link(one, one), Link(other, other)
    here.send(Stop())
    here.close()
    assert there.receive() == [Stop()]
    with pytest.raises(EOFError):
        there.receive()
    with pytest.raises(BrokenPipeError):
        there.send(Alive())
    there.close()


def test_a_reader_that_reads_nothing_is_noticed_before_a_message_would_wait() -> None:
    reads, writes = os.pipe()
    link, sent = Link(reads, writes), 0
    while link.writable():
        link.send(Failed(0, "x" * 1000))
        sent += 1
    assert sent > 10
    link.receive()
    assert link.writable()
    link.close()


def test_an_unblocked_link_keeps_what_is_not_taken_and_sends_it_later(ends: tuple[Link, Link]) -> None:
    here, there = ends
    here.unblock()
    assert here.receive() == [], "there is nothing to read, and nothing to wait for"
    sent = [Failed(number, str(number) * 300_000) for number in range(3)]
    for message in sent:
        here.send(message)
    found = list[Message]()
    while not here.write():
        found += there.receive()
    assert len(found) < len(sent), "the end was not there yet"
    while len(found) < len(sent):
        found += there.receive()
    assert found == sent


def test_a_closed_link_writes_to_no_other_file(tmp_path: Path) -> None:
    """Its descriptor may be that of another file by then."""
    with (tmp_path / "file").open("wb") as file:
        one, other = socket.socketpair()
        number = one.detach()
        link = Link(number, number)
        link.close()
        os.dup2(file.fileno(), number)
        with other, pytest.raises(OSError):
            link.send(Alive())
        os.close(number)
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.long
def test_children_of_a_rank_get_neither_the_link_nor_its_name() -> None:
    ours, theirs = socket.socketpair()
    number = theirs.fileno()
    tries = f"import os, sys; assert {RANK_LINK!r} not in os.environ; os.fstat({number})"
    program = (
        "import subprocess, sys\nfrom engine.control.link import Link\nfrom engine.control.protocol import Failed\n"
        "link = Link.to_agent()\n"
        f"done = subprocess.run([sys.executable, '-c', {tries!r}], close_fds=False, capture_output=True, text=True)\n"
        "link.send(Failed(0, done.stderr))\nassert Link.to_agent() is None"
    )
    with ours, theirs:
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, RANK_LINK: str(number)}, pass_fds=[number], check=True
        )
        (message,) = Link(ours.fileno(), ours.fileno()).receive()
    assert isinstance(message, Failed) and "Bad file descriptor" in message.why


def test_a_process_that_no_agent_has_started_has_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RANK_LINK, raising=False)
    assert Link.to_agent() is None
