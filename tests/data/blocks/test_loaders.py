"""Loaders make blocks appear earlier. Whatever happens to them, each block is packed, and once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.config import schema
from engine.data.blocks import loaders as module
from engine.data.blocks import work
from engine.data.blocks.loaders import Loaders
from engine.data.blocks.spool import trim
from engine.data.blocks.work import Work
from engine.data.parts import Tokens, is_packed, pack_block, part_path
from engine.errors import DataError
from tests.data.blocks.loading import TEXTS, TOKENS, aged, ask, contents, encode, packer, running, sizes, wait_until
from tests.data.noted import Noted, ends, starts
from tests.data.reading import text_corpus
from tests.refusals import refused
from tests.root import ROOT

pytestmark = pytest.mark.long

MakeData = Callable[..., schema.Data]


def test_blocks_are_packed_by_other_processes(blocks: list[Noted], cache: Path) -> None:
    with running(2) as loaders:
        for part in ask(loaders, cache, blocks):
            loaders.wait(part)
            assert is_packed(part) and contents(part) == [encode(text).tolist() for text in TEXTS]
    assert [(starts(block), ends(block)) for block in blocks] == [(1, 1)] * 6
    processes = {process for block in blocks for _, process in block.notes()}
    assert os.getpid() not in processes and 1 <= len(processes) <= 2


def test_blocks_are_packed_in_the_order_in_which_they_are_asked_for(blocks: list[Noted], cache: Path) -> None:
    """What is asked for last replaces what was asked for before."""
    with running(1) as loaders:
        blocks[0].hold()
        ask(loaders, cache, blocks[:4])
        packer(blocks[0])
        parts = ask(loaders, cache, [blocks[5], blocks[0], blocks[4]])
        blocks[0].release()
        for part in parts:
            loaders.wait(part)
    assert [starts(block) for block in blocks] == [1, 0, 0, 0, 1, 1]
    order = sorted((part for part in parts), key=lambda part: Path(f"{part}.idx").stat().st_mtime_ns)
    assert order == [parts[1], parts[0], parts[2]]


def test_what_is_there_is_not_packed(blocks: list[Noted], cache: Path) -> None:
    pack_block(TOKENS, cache, blocks[0])
    with running(1) as loaders:
        for part in ask(loaders, cache, blocks[:2]):
            loaders.wait(part)
    assert [starts(block) for block in blocks[:2]] == [1, 1]


def test_the_files_of_a_block_are_looked_up_when_it_is_new(
    blocks: list[Noted], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step asks for the blocks of many steps, most of which the step before has asked for."""
    looked_up = list[Noted]()

    def path_of(tokens: Tokens, folder: Path, block: Noted) -> Path:
        looked_up.append(block)
        return part_path(tokens, folder, block)

    monkeypatch.setattr(work, "part_path", path_of)
    with running(1) as loaders:
        for first, last in ((0, 3), (0, 3), (1, 5), (2, 6), (0, 2)):
            asked = [Work(TOKENS, cache, block) for block in blocks[first:last]]
            loaders.ask([*asked, *asked])
        assert looked_up == [*blocks, *blocks[:2]]
        other = Tokens("bytes", None, False)
        loaders.ask([Work(TOKENS, cache, blocks[0]), Work(other, cache, blocks[0])])
        assert looked_up[8:] == blocks[:1], "with other tokens it is another token file"


@pytest.mark.parametrize("when", ["before", "while", "after"])
def test_a_file_that_changes_after_its_block_was_asked_for(
    blocks: list[Noted], cache: Path, make_data: MakeData, tmp_path: Path, when: str
) -> None:
    """The path that the loaders remember is no longer the block's. What is read is the file as it is then."""
    held = blocks[0 if when == "before" else 1]
    held.hold()
    with running(1) as loaders:
        corpus = text_corpus(make_data(tmp_path, cache=str(cache)), blocks, loaders=loaders)
        old = ask(loaders, cache, blocks[:2])[1]
        packer(held)
        if when == "after":
            held.release()
            loaders.wait(old)
        Noted.write(blocks[1].path, [b"other", *TEXTS])
        new = ask(loaders, cache, blocks[:2])[1]
        if when != "after":
            held.release()
        assert len(corpus.lengths(1).inputs()) == 4 and len(corpus.lengths(0).inputs()) == 3
    assert old != new and contents(new) == [encode(text).tolist() for text in (b"other", *TEXTS)]


def test_nobody_waits_for_a_block_that_nobody_packs(blocks: list[Noted], cache: Path) -> None:
    with running(1) as loaders:
        loaders.wait(part_path(TOKENS, cache, blocks[0]))
    loaders.wait(part_path(TOKENS, cache, blocks[0]))
    assert not starts(blocks[0])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("count", [1, 3])
def test_a_block_is_packed_whatever_happens_to_its_loader(
    blocks: list[Noted], cache: Path, how: signal.Signals, count: int
) -> None:
    """Another loader packs it, once; the others go on."""
    blocks[0].hold()
    with running(count) as loaders:
        parts = ask(loaders, cache, blocks)
        victim = packer(blocks[0])
        os.kill(victim, how)
        wait_until(lambda: starts(blocks[0]) == 2)
        blocks[0].release()
        for part in parts:
            loaders.wait(part)
            assert contents(part) == [encode(text).tolist() for text in TEXTS]
        assert not alive(victim)
    assert [(starts(block), ends(block)) for block in blocks] == [(2, 1), *[(1, 1)] * 5]


def test_a_loader_that_is_killed_at_its_birth_is_replaced(
    blocks: list[Noted], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    born, start = list[int](), module._CONTEXT.Process.start

    def kill_first(process: Any) -> None:
        start(process)
        born.append(process.pid)
        if len(born) < 3:
            process.kill()

    monkeypatch.setattr(module._CONTEXT.Process, "start", kill_first)
    with running(1) as loaders:
        for part in ask(loaders, cache, blocks):
            loaders.wait(part)
            assert is_packed(part)
    assert len(born) == 3 and os.getpid() not in {process for block in blocks for _, process in block.notes()}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_idle_loader_is_replaced(blocks: list[Noted], cache: Path, how: signal.Signals) -> None:
    with running(1) as loaders:
        loaders.wait(*ask(loaders, cache, blocks[:1]))
        (_, victim), _ = blocks[0].notes()
        os.kill(victim, how)
        wait_until(lambda: not alive(victim))
        loaders.wait(*ask(loaders, cache, blocks[1:2]))
    assert [ends(block) for block in blocks[:2]] == [1, 1]
    assert blocks[1].notes()[0][1] != victim


def test_signals_of_a_scheduler_and_of_a_terminal_end_no_loader(blocks: list[Noted], cache: Path) -> None:
    """They are sent to all processes of a job; the rank needs its data until it has saved."""
    blocks[0].hold()
    with running(1) as loaders:
        (part,) = ask(loaders, cache, blocks[:1])
        loader = packer(blocks[0])
        for sent in (signal.SIGTERM, signal.SIGINT):
            os.kill(loader, sent)
        blocks[0].release()
        loaders.wait(part)
    assert (starts(blocks[0]), ends(blocks[0])) == (1, 1)


def test_a_block_of_which_loaders_die_is_given_up(
    blocks: list[Noted], cache: Path, make_data: MakeData, tmp_path: Path
) -> None:
    """For example for want of memory. The caller that needs it packs it; the others are packed."""
    blocks[0].kill(but=os.getpid())
    with running(1) as loaders:
        corpus = text_corpus(make_data(tmp_path, cache=str(cache)), blocks, loaders=loaders)
        ask(loaders, cache, blocks)
        assert len(corpus.lengths(0).inputs()) == 3
        assert len(corpus.lengths(5).inputs()) == 3
    assert (starts(blocks[0]), ends(blocks[0])) == (1 + module._ATTEMPTS, 1)
    assert starts(blocks[5]) == 1


def test_a_block_that_cannot_be_packed_is_an_error_of_the_caller_that_waits(
    blocks: list[Noted], cache: Path, make_data: MakeData, tmp_path: Path
) -> None:
    blocks[0].break_()
    with running(2) as loaders:
        corpus = text_corpus(make_data(tmp_path, cache=str(cache)), blocks, loaders=loaders)
        ask(loaders, cache, blocks)
        with refused(DataError, f"{tmp_path}/0"):
            corpus.lengths(0)
        assert all(len(corpus.lengths(block).inputs()) == 3 for block in range(1, 6))
    assert {process for _, process in blocks[0].notes()} >= {os.getpid()} and starts(blocks[0]) == 2


def test_loaders_of_two_runs_pack_a_block_once(blocks: list[Noted], cache: Path) -> None:
    for block in blocks:
        block.hold()
    with running(2) as one, running(2) as other:
        parts = ask(one, cache, blocks)
        ask(other, cache, blocks)
        wait_until(lambda: sum(map(starts, blocks)) >= 2)
        for block in blocks:
            block.release()
        for part in parts:
            one.wait(part)
            other.wait(part)
            assert is_packed(part)
    assert [(starts(block), ends(block)) for block in blocks] == [(1, 1)] * 6


def test_loaders_of_two_hosts_share_the_work(blocks: list[Noted], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are asked for the same blocks in the same order. No loader waits for a block of another host."""
    begun, begin = list[Path](), module._Loader.begin

    def note(loader: module._Loader, part: Path, work: Work) -> None:
        begun.append(part)
        begin(loader, part, work)

    blocks[0].hold()
    with running(1) as one:
        parts = ask(one, cache, blocks)
        first = packer(blocks[0])
        monkeypatch.setattr(module._Loader, "begin", note)
        with running(1) as other:
            ask(other, cache, blocks)
            for part in parts[1:]:
                other.wait(part)
            assert [ends(block) for block in blocks] == [0, 1, 1, 1, 1, 1]
            time.sleep(1)
            assert begun.count(parts[0]) <= 4, "a block that is being packed is tried about once a second"
            waiting = threading.Thread(target=other.wait, args=(parts[0],))
            waiting.start()
            waiting.join(0.3)
            assert waiting.is_alive()
            blocks[0].release()
            waiting.join(10)
            assert not waiting.is_alive() and is_packed(parts[0])
    assert [(starts(block), ends(block)) for block in blocks] == [(1, 1)] * 6
    assert blocks[0].notes()[-1][1] == first


def test_a_block_of_a_host_that_dies_is_packed_by_another(blocks: list[Noted], cache: Path) -> None:
    blocks[0].hold()
    with running(1) as other:
        with running(1) as one:
            (part,) = ask(one, cache, blocks[:1])
            first = packer(blocks[0])
            ask(other, cache, blocks)
            other.wait(part_path(TOKENS, cache, blocks[5]))
        wait_until(lambda: starts(blocks[0]) == 2)
        blocks[0].release()
        other.wait(part)
        assert contents(part) == [encode(text).tolist() for text in TEXTS]
    assert ends(blocks[0]) == 1 and blocks[0].notes()[-1][1] != first


def test_a_block_that_another_host_has_packed_is_not_waited_for(blocks: list[Noted], cache: Path) -> None:
    """Though the only loader is still packing another one."""
    for block in blocks[:2]:
        block.hold()
    with running(1) as one, running(1) as other:
        (part,) = ask(one, cache, blocks[:1])
        packer(blocks[0])
        ask(other, cache, blocks[:2])
        packer(blocks[1])
        blocks[0].release()
        other.wait(part)
        assert is_packed(part) and not ends(blocks[1])


def test_waiting_ends_when_the_loaders_are_closed(blocks: list[Noted], cache: Path) -> None:
    blocks[0].hold()
    loaders = Loaders(1, 1 << 40)
    (part,) = ask(loaders, cache, blocks[:1])
    packer(blocks[0])
    waiting = threading.Thread(target=loaders.wait, args=(part,))
    waiting.start()
    loaders.close()
    waiting.join(10)
    assert not waiting.is_alive() and not is_packed(part)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_loaders_that_cannot_be_started_again(
    blocks: list[Noted], cache: Path, make_data: MakeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    blocks[0].hold()
    with running(1) as loaders:
        corpus = text_corpus(make_data(tmp_path, cache=str(cache)), blocks, loaders=loaders)
        ask(loaders, cache, blocks)
        victim = packer(blocks[0])
        monkeypatch.setattr(module, "_Loader", full)
        os.kill(victim, signal.SIGKILL)
        blocks[0].release()
        assert [len(corpus.lengths(block).inputs()) for block in (0, 5)] == [3, 3]


# Processes that are left


def alive(process: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    return False


def test_no_loader_is_left_after_the_end(blocks: list[Noted], cache: Path) -> None:
    """Not even one that packs."""
    for block in blocks:
        block.hold()
    with running(3) as loaders:
        ask(loaders, cache, blocks)
        started = [packer(block) for block in blocks[:3]]
        assert len({*started}) == 3
    assert not any(map(alive, started))


OWNER = """
import sys, time
from pathlib import Path
from engine.data.blocks.loaders import Loaders
from engine.data.blocks.work import Work
from engine.data.parts import Tokens
from tests.data.blocks.loading import TEXTS, TOKENS, aged, ask, contents, encode, packer, running, sizes, wait_until
from tests.data.noted import Noted
if __name__ == "__main__":
    loaders = Loaders(2, 1 << 40)
    folder = Path(sys.argv[1])
    blocks = [Noted(folder / str(number)) for number in range(2)]
    loaders.ask(Work(Tokens("bytes", None, None), folder / "cache", block) for block in blocks)
    print("asked", flush=True)
    if sys.argv[2] == "exits":
        while not all(block.notes() for block in blocks):
            time.sleep(0.01)
        sys.exit(3)
    time.sleep(600)
"""


@pytest.mark.parametrize("how", ["killed", "exits"])
def test_no_loader_is_left_when_its_owner_ends(blocks: list[Noted], tmp_path: Path, how: str) -> None:
    """However it ends, and also without `close`, even if a signal has stopped a loader."""
    for block in blocks[:2]:
        block.hold()
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, str(script), str(tmp_path), how], env=environment, cwd=ROOT) as owner:
        started = [packer(block) for block in blocks[:2]]
        family = psutil.Process(owner.pid).children(recursive=True)
        if how == "killed":
            os.kill(started[0], signal.SIGSTOP)
            owner.kill()
        for block in blocks[:2]:
            block.release()
        try:
            assert owner.wait(30) == (3 if how == "exits" else -signal.SIGKILL)
        finally:
            owner.kill()
    wait_until(lambda: not any(map(alive, started)))
    _, left = psutil.wait_procs(family, timeout=20)
    assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]


# The size of the cache folder


def test_loaders_keep_the_folder_small(blocks: list[Noted], cache: Path) -> None:
    """What is wanted next stays, though it exceeds the limit."""
    parts = aged(cache, blocks[:4])
    with running(1, spool=1) as loaders:
        wanted = ask(loaders, cache, [blocks[4], blocks[1], blocks[5]])
        for part in wanted:
            loaders.wait(part)
        wait_until(lambda: not is_packed(parts[0]) and not is_packed(parts[3]))
        loaders.wait(*ask(loaders, cache, blocks[5:]))
    assert is_packed(wanted[2])


def test_the_folder_is_listed_only_when_it_may_be_full(
    blocks: list[Noted], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_block(TOKENS, cache, blocks[0])
    left, each = list[int](), sizes(cache)

    def count(*trimmed: Any) -> int:
        left.append(trim(*trimmed))
        return left[-1]

    monkeypatch.setattr(module, "trim", count)
    with running(1, spool=4 * each) as loaders:
        for part in ask(loaders, cache, blocks[1:]):
            loaders.wait(part)
        wait_until(lambda: len(left) == 4)  # the last block may be packed before its loader has said so
    # After the first block three fit; whenever there may be more, what is wanted next stays.
    assert left == [2 * each, 4 * each, 4 * each, 5 * each]


def test_a_pool_that_grows_and_shrinks_packs_each_block_once(blocks: list[Noted], cache: Path) -> None:
    """A loader that is too many ends between two blocks, so no work is lost."""
    with running(1) as loaders:
        for block in blocks[:3]:
            block.hold()
        parts = ask(loaders, cache, blocks)
        packer(blocks[0])
        loaders.resize(3)
        processes = {packer(block) for block in blocks[:3]}
        assert len(processes) == loaders.count == 3 and starts(blocks[3]) == 0
        loaders.resize(1)
        blocks[0].release()
        wait_until(lambda: sum(map(psutil.pid_exists, processes)) == 2)
        blocks[1].release()
        wait_until(lambda: sum(map(psutil.pid_exists, processes)) == 1)
        assert [starts(block) for block in blocks] == [1, 1, 1, 0, 0, 0], "the last one has its block"
        blocks[2].release()
        for part in parts:
            loaders.wait(part)
        assert psutil.pid_exists(process := packer_of(blocks[5])) and process in processes
    assert [(starts(block), ends(block)) for block in blocks] == [(1, 1)] * 6


def packer_of(block: Noted) -> int:
    """Return the process that has packed a block."""
    return block.notes()[-1][1]


def test_what_is_missing_and_runs_is_known_by_source(blocks: list[Noted], cache: Path) -> None:
    with running(1) as loaders:
        blocks[1].hold()
        works = [Work(TOKENS, cache, block, "s", number) for number, block in enumerate(blocks[:4])]
        loaders.ask(works)
        packer(blocks[1])
        assert [work.number for work in loaders.missing()] == [1, 2, 3]
        (source, seconds), *others = loaders.running()
        assert source == "s" and 0 <= seconds < 5 and not others
        blocks[1].release()
        for work in works:
            loaders.wait(work.part())
        assert loaders.missing() == loaders.running() == []
