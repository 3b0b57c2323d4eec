"""Each benchmark that no test of its own runs as a command line, at a small size."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import data_memory, hosts, loss, mixed
from benchmarks.traces import TRACES, draw, settings_of
from tests.benchmarks.rows import measured
from tests.root import ROOT

pytestmark = pytest.mark.long


def test_the_loss() -> None:
    plain, chunks = measured(loss, "plain", "chunks", "--tokens", "64", "--vocab", "500", "--hidden", "8")["rows"]
    assert (plain["peak_over_first"], plain["difference_loss"]) == (1, 0)
    assert chunks["difference_weight"] < 1e-5


SMALL = ["--sources", "2", "--megabytes", "1", "--steps", "2"]


def test_hosts() -> None:
    apart, together = measured(hosts, "2/none", "2/peers", *SMALL)["rows"]
    assert (apart["ratio"], together["ratio"]) == (2, 1) and together["holds"]
    assert apart["digests"] == together["digests"]


@pytest.mark.world
def test_hosts_on_ray() -> None:
    pytest.importorskip("ray")
    (row,) = measured(hosts, "2/ray", *SMALL)["rows"]
    assert row["ratio"] == 1 and row["holds"] and len(row["digests"]) == 2


@pytest.mark.world
@pytest.mark.slow
def test_clients() -> None:
    """In a process of its own, which imports ray."""
    pytest.importorskip("ray")
    sizes = ["--clients", "16", "64", "--sources", "4", "--rounds", "1", "--step-s", "1", "--json"]
    command = [sys.executable, str(ROOT / "benchmarks/clients.py"), *sizes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    often, few, many = json.loads(done.stdout)["rows"]
    assert [(row["step_s"], row["fetches"]) for row in (often, few, many)] == [(0.25, 16), (1, 16), (1, 64)]
    assert 0 < often["p50_ms"] <= often["p99_ms"] and often["p50_ratio"] == often["p99_ratio"] == 1
    assert 0 < few["bytes"] < 1.2 * many["bytes"]


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
