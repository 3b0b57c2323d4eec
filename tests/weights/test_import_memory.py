"""Reading weights takes the largest shard beside the model's own bytes; a second copy of a 70B model would not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.import_memory import LARGE, LARGE_VOCAB, generate, in_a_process

pytestmark = pytest.mark.long

SMALL = ["model.hidden=512", "model.ffn=2048", "model.layers=12", "model.heads=8", "model.kv_heads=8"]


def held(folder: Path, model: list[str]) -> tuple[int, float, float]:
    """Return the bytes of the parameters, and what loading and importing took in largest shards."""
    largest = generate(folder / "theirs", model, shards=4)
    parameters, load = in_a_process("load", folder / "theirs", model)
    _, copy = in_a_process("import", folder / "theirs", model)
    return parameters, load / largest, copy / largest


def test_a_shard_at_a_time(tmp_path: Path) -> None:
    """Of 100 MB of weights; in the test below of 1 GB, where what Python itself takes is nothing."""
    parameters, load, copy = held(tmp_path, SMALL)
    assert parameters > 200e6
    assert load < 1.3
    assert copy < 0.3


@pytest.mark.slow
def test_a_shard_at_a_time_of_a_gigabyte(tmp_path: Path) -> None:
    parameters, load, copy = held(tmp_path, [*LARGE, LARGE_VOCAB])
    assert parameters > 2e9
    assert load < 1.3
    assert copy < 0.1
