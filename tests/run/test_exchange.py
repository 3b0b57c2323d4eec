"""Ranks exchange values through files."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from engine.run.exchange import FileExchange


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_every_rank_gets_the_values_of_all_in_rank_order(tmp_path: Path, ranks: int) -> None:
    """Else the manifest would miss the files of a rank."""
    found: dict[int, list[Any]] = {}

    def one(rank: int) -> None:
        exchange = FileExchange(tmp_path / "facts", rank, ranks)
        found[rank] = [exchange({"rank": rank, "call": call}) for call in range(4)]

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in reversed(range(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    expected = [[{"rank": rank, "call": call} for rank in range(ranks)] for call in range(4)]
    assert found == dict.fromkeys(range(ranks), expected)


def test_no_rank_goes_on_before_the_last_one_has_called(tmp_path: Path) -> None:
    """The calls are also barriers: no rank may list files that another is still writing."""
    done: list[int] = []

    def one(rank: int) -> None:
        FileExchange(tmp_path / "facts", rank, 3)({})
        done.append(rank)

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(3)]
    for thread in threads[:2]:
        thread.start()
    threads[0].join(0.2)
    assert not done
    threads[2].start()
    for thread in threads:
        thread.join(20)
    assert sorted(done) == [0, 1, 2]
