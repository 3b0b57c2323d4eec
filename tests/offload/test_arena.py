from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from engine.errors import MemoryFitError
from engine.offload.arena import Arena
from tests.refusals import refused

CPU = torch.device("cpu")


def arena(need: int, limit: int = 1 << 20) -> Arena:
    made = Arena(CPU, limit)
    made.reset(need)
    return made


def test_what_is_taken_lies_apart_and_is_aligned() -> None:
    made = arena(10_000)
    first, second = made.take(100), made.take(1000)
    assert first is not None and second is not None
    first.fill_(1)
    second.fill_(2)
    assert (first == 1).all() and (second == 2).all()
    assert (second.data_ptr() - first.data_ptr()) % 512 == 0


def test_without_room_there_is_none_until_it_is_reset() -> None:
    made = arena(1000)
    assert made.take(1000) is not None and made.take(1) is None
    made.reset(1000)
    assert made.take(1000) is not None


def test_it_grows_by_a_quarter_at_least_and_never_beyond_its_limit() -> None:
    made = arena(1000, limit=2000)
    sizes = []
    for need in (500, 1001, 1600, 5000, 10):
        made.reset(need)
        sizes.append(made.size)
    assert sizes == [1000, 1250, 1600, 2000, 2000]


def refusing(monkeypatch: pytest.MonkeyPatch, above: int) -> None:
    """Let the host give no more than some bytes, as a failing pinned allocation does."""
    plain = torch.empty

    def empty(size: Any, **more: Any) -> torch.Tensor:
        if isinstance(size, int) and size > above:
            raise RuntimeError("CUDA error: out of memory")
        return plain(size, **more)

    monkeypatch.setattr(torch, "empty", empty)


def test_a_host_that_gives_less_is_asked_once_for_half(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refusing(monkeypatch, above=600)
    with caplog.at_level(logging.WARNING):
        made = arena(1000)
    assert made.size == made.pop_short() == 500 and "cannot allocate 1,000 bytes" in caplog.text
    made.reset(1000)
    assert made.size == 500, "it is not asked again in every micro-batch"
    assert made.pop_short() == 500
    made.reset(400)
    assert not made.pop_short(), "this one has what it needs"
    made.reset(700)
    made.reset(0)
    assert made.pop_short() == 200, "the most of all micro-batches"


def test_a_host_that_gives_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(monkeypatch, above=10)
    with refused(MemoryFitError):
        arena(1000)


def test_a_host_without_the_room_to_grow_gives_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = arena(1000)
    refusing(monkeypatch, above=1200)
    made.reset(1100)
    assert made.size == 1100, "a quarter more than 1000 is not to be had"
    made.reset(1200)
    assert made.size == 1200 and not made.pop_short()
