"""The benchmark without its training runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import hdp_vs_static as bench
from engine.config.load import load
from engine.data.overview import Corpora
from tests.benchmarks.rows import measured

pytestmark = pytest.mark.long

K = 1024


@pytest.fixture
def cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[bench.Cell]:
    monkeypatch.setattr(bench, "draw", lambda *_, **__: np.array([20 * K, 2 * K, 2 * K]))
    monkeypatch.setattr(bench, "QUIET", [*bench.QUIET, "data.validation_share=0"])
    monkeypatch.setattr(bench, "_library_text", lambda: b"text " * 100)
    return bench.cells(tmp_path)


def test_the_best_round_of_each_is_compared(cells: list[bench.Cell], monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {"static-0": 100.0, "static-1": 80.0, "balanced-0": 90.0, "balanced-1": 150.0}
    monkeypatch.setattr(bench, "tokens_per_s", lambda cell, planner, steps, out: speeds[out.name[-len(planner) - 2 :]])
    monkeypatch.setattr(bench, "needs_no_ring", lambda cell, steps: 0.25)
    monkeypatch.setattr(bench, "cells", lambda folder: cells[:1])
    (row,) = measured(bench, "8192/standard")["rows"]
    assert (row["static_tokens_per_s"], row["balanced_tokens_per_s"], row["ratio"]) == (100, 150, 1.5)
    assert row["no_ring_share"] == 0.25


def test_written_documents_have_the_requested_lengths(tmp_path: Path) -> None:
    text = "def f():\n\treturn 'é\"\\'\n".encode()
    bench.write_jsonl(tmp_path / "mix.jsonl", [2, 3, 1000, 17], text, seed=5)
    config = load(["recipe=quickstart", "data=jsonl", f"data.path={tmp_path / 'mix.jsonl'}"])
    (corpus,) = Corpora(config).sources
    assert corpus.blocks == 1 and corpus.lengths(0).inputs().tolist() == [2, 3, 1000, 17]
    written = json.loads((tmp_path / "mix.jsonl").read_text().splitlines()[2])["text"]
    ascii_ = text.decode("latin1").replace("Ã", "?").replace("©", "?")
    assert written in ascii_ * 50
