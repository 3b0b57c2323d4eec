"""Each benchmark that no test of its own runs as a command line, at a small size."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import data_memory, hosts, loss, mixed
from benchmarks.traces import TRACES, draw, settings_of
from tests.benchmarks.rows import measured

pytestmark = pytest.mark.long


def test_the_loss() -> None:
    plain, chunks = measured(loss, "plain", "chunks", "--tokens", "64", "--vocab", "500", "--hidden", "8")["rows"]
    assert (plain["peak_over_first"], plain["difference_loss"]) == (1, 0)
    assert chunks["difference_weight"] < 1e-5


def test_hosts() -> None:
    apart, together = measured(hosts, "2", "--sources", "2", "--megabytes", "1", "--steps", "2")["rows"]
    assert (apart["ratio"], together["ratio"]) == (2, 1) and together["holds"]
    assert apart["digests"] == together["digests"]


def test_the_memory_of_loading() -> None:
    sizes = ["--sources", "2", "--ranks", "2", "--loaders", "1", "--steps", "2"]
    (row,) = measured(data_memory, "0.8MB", *sizes)["rows"]
    assert row["planning process"] > 20 and row["loaders"] > 20 and row["DataLoaders"] > 0
    assert row["all"] >= row["planning process"] + row["loaders"] and row["ratio"] > 0


def test_traces() -> None:
    for trace in TRACES:
        settings, lengths = settings_of(trace, 8), draw(trace, 8, 50, seed=1)
        assert len(lengths) == 50 and lengths.min() >= 1 and lengths.max() <= settings.context
        assert np.array_equal(lengths, draw(trace, 8, 50, seed=1))
        assert not np.array_equal(lengths, draw(trace, 8, 50, seed=2))


def test_a_mixed_cluster() -> None:
    (row,) = measured(mixed, "64/github", "--seeds", "1")["rows"]
    assert row["over_bound"] == row["worst"] >= 1 - 1e-4, "of one seed"
    assert row["over_bound"] < row["blind"]
