"""Two real ranks of the doctor, and what is said if they fail."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from engine.doctor import rank, ranks
from engine.run.folder import RunFolder

pytestmark = pytest.mark.world


def test_two_ranks_sum_and_send(tmp_path: Path) -> None:
    found = ranks.two_ranks(tmp_path)
    assert [(check.name, check.state) for check in found] == [("all-reduce", "ok"), ("ring", "ok")]
    assert str(found[0].value).startswith("gloo, ")


def test_a_broken_interface_is_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    first, second = ranks.two_ranks(tmp_path)
    assert (first.state, second.state) == ("failed", "skipped")
    assert "eth77" in first.message and str(tmp_path) in str(first.hint)


def test_ranks_that_take_too_long_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_LIMIT_S", 0.5)
    began = time.monotonic()
    first, second = ranks.two_ranks(tmp_path)
    assert (first.state, second.state) == ("failed", "skipped") and "not finished in 0 s" in first.message
    assert time.monotonic() - began < 20


def test_the_part_that_failed_is_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    rank.result(folder, "all-reduce").write_text('{"seconds": 0.002}')
    first, second = (ranks._check(folder, part, "NCCL", "rank 1 failed: timed out", "look") for part in rank.PARTS)
    assert (first.state, first.value) == ("ok", "NCCL, 2 ms")
    assert (second.state, second.message) == ("failed", "2 ranks with NCCL: rank 1 failed: timed out")
