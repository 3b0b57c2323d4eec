"""What packing a block costs: if it is wrong, the pool of loaders has the wrong size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.data.blocks import work
from engine.data.blocks.work import Cost, Work, pack_and_measure
from engine.errors import DataError
from tests.data.blocks.loading import TEXTS, TOKENS
from tests.data.noted import Noted

BUSY = "import time\nwhile time.process_time() < .4: pass\nprint(flush=True)\ninput()"


def test_a_block_is_measured_once(tmp_path: Path) -> None:
    block = Work(TOKENS, tmp_path / "cache", Noted.write(tmp_path / "block", TEXTS), "web")
    packed, measured = pack_and_measure(block)
    assert packed and measured is not None
    assert measured[:4] == (1, 3, block.block.size, sum(len(text) + 2 for text in TEXTS))
    assert 0 < measured.seconds < 5 and 10 << 20 < measured.memory < 64 << 30
    assert pack_and_measure(block) == (True, None)


def test_a_block_that_cannot_be_packed_is_an_error(tmp_path: Path) -> None:
    block = Noted.write(tmp_path / "block", TEXTS)
    (tmp_path / "block.broken").touch()
    with pytest.raises(DataError):
        pack_and_measure(Work(TOKENS, tmp_path / "cache", block))


def test_processes_that_pack_for_the_loader_count() -> None:
    """Chat templates run in a process of their own, which lives as long as the loader."""
    before = work._processor_seconds()
    with subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        lives = work._processor_seconds() - before
        process.communicate(b"\n")
    assert lives >= 0.35 and work._processor_seconds() - before >= lives - 0.05


def test_costs_are_added_and_memory_is_the_largest() -> None:
    assert Cost(1, 2, 3, 4, 0.5, 7).plus(Cost(1, 1, 1, 1, 0.25, 6)) == Cost(2, 3, 4, 5, 0.75, 7)
    assert Cost().plus(Cost(1, 2, 3, 4, 0.5, 7)) == Cost(1, 2, 3, 4, 0.5, 7)
