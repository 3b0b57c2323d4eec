from __future__ import annotations

from pathlib import Path

import pytest

from engine.cluster import numa
from engine.cluster.numa import listed, node_of, of_ranks, processors_of, spans_nodes
from tests.cluster.sysfs import fake

A, B, C = "0000:1b:00.0", "0000:3b:00.0", "0000:9a:00.0"


@pytest.fixture
def two_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight processors on each of two nodes, with hyperthreads; the third GPU is on the second node."""
    monkeypatch.setattr(numa, "SYS", fake(tmp_path, ["0-3,8-11", "4-7,12-15", ""], {A: "0", B: "0", C: "1"}))


FIRST, SECOND = {0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}
ALL = FIRST | SECOND


@pytest.mark.usefixtures("two_sockets")
@pytest.mark.parametrize(
    ("gpus", "allowed", "expected"),
    [
        ([A, B, C], ALL, [FIRST, FIRST, SECOND]),  # ranks of a node share it
        ([A, C], ALL - {0, 15}, [FIRST - {0}, SECOND - {15}]),  # a container has taken some
        ([C], ALL, [SECOND]),
        ([A, C], FIRST, [FIRST, FIRST]),  # of a job that may use one socket only
        ([A, "0000:00:00.0", ""], ALL, [FIRST, ALL, ALL]),  # not known
        ([A, A, C, C], {0, 4, 5, 6, 7}, [{0, 4, 5, 6, 7}, {0, 4, 5, 6, 7}, {4, 5, 6, 7}, {4, 5, 6, 7}]),
        ([A, A, A], ALL, [ALL, ALL, ALL]),  # all GPUs at one socket: two processors each are too few
    ],
)
def test_ranks_run_near_their_gpus(gpus: list[str], allowed: set[int], expected: list[set[int]]) -> None:
    assert of_ranks(gpus, allowed) == expected


@pytest.mark.parametrize("gpu", ["-1", "", "x", "7"])
def test_a_system_that_does_not_say_where_a_gpu_is_binds_nothing(
    gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """-1 is a GPU without a node, for example in a virtual machine; there is no node 7."""
    monkeypatch.setattr(numa, "SYS", fake(tmp_path, ["0-7", "8-15"], {A: gpu}))
    assert processors_of(node_of(A)) == set()
    assert of_ranks([A], ALL) == [ALL]


@pytest.mark.usefixtures("two_sockets")
def test_processors_of_several_nodes() -> None:
    assert spans_nodes(ALL) and spans_nodes({3, 4}) and not spans_nodes(FIRST) and not spans_nodes({12})


def test_without_sysfs_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "SYS", tmp_path)
    assert of_ranks([A, B], ALL) == [ALL, ALL] and not spans_nodes(ALL)


@pytest.mark.parametrize("text", ["0-3,8-11", "5", "0,2,4", ""])
def test_lists_are_those_of_linux(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "SYS", fake(tmp_path, [text], {}))
    assert listed(processors_of(0)) == text
