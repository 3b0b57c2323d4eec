from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import pytest

from engine.hardware.measured import Case, Timing, cases, read, read_network
from tests.hardware.machines import measured, network


@pytest.mark.parametrize("longest", [1024, 16384, 65536])
def test_no_rank_holds_more_than_the_longest(longest: int) -> None:
    found = cases(2, 1, 2, longest)
    assert max(sum(case.unsplit) + sum(case.ring) for case in found) <= longest
    assert all(case.unsplit or case.ring for case in found)
    assert len(set(found)) == len(found)


def test_every_term_can_be_fitted() -> None:
    """One sequence of several lengths, several sequences, other layers, rings, and a ring with unsplit sequences."""
    found = cases(2, 1, 2, 1024)
    assert {case.unsplit for case in found} >= {(32,), (1024,), (24, 40) * 8, (96, 160) * 2}
    assert {case.layers for case in found} == {1, 2}
    assert {case.ring for case in found} >= {(32,), (1024,), (24, 40) * 4, (96, 160) * 2}
    assert any(case.ring and case.unsplit for case in found)


def test_neighbours_have_unequal_lengths() -> None:
    """Those of equal length may be computed in one call, which hardly ever happens in training."""
    for case in cases(2, 1, 2, 16384):
        assert all(a != b for lengths in (case.unsplit, case.ring) for a, b in pairwise(lengths)), case


def test_gpus_measure_full_micro_batches_of_both_numbers_of_layers() -> None:
    """Of 32K tokens, or all would be launch-bound. CPUs measure up to 16K tokens, so theirs stay as they are."""
    full = [case for case in cases(4, 2, 2, 65536) if sum(case.unsplit) == 32768 and len(case.unsplit) > 1]
    assert {case.layers for case in full} == {4, 2}
    assert any(sum(case.ring) == 32768 and len(case.ring) > 1 for case in cases(4, 2, 2, 65536))


def test_one_rank_has_no_rings() -> None:
    assert not any(case.ring for case in cases(2, 1, 1, 16384))


def test_a_model_of_one_layer_has_no_second_number_of_layers() -> None:
    assert {case.layers for case in cases(1, None, 2, 1024)} == {1}


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_was_written_is_read(tmp_path: Path, ranks: int) -> None:
    measured(ranks).write(tmp_path / "measured.json")
    assert read(tmp_path / "measured.json") == measured(ranks)


def test_what_two_nodes_wrote_is_read(tmp_path: Path) -> None:
    (tmp_path / "network.json").write_text(json.dumps(asdict(network(2, 1))))
    assert read_network(tmp_path / "network.json") == network(2, 1)
    both = replace(measured(), network=network(2, 1))
    both.write(tmp_path / "measured.json")
    assert read(tmp_path / "measured.json") == both


def test_a_case_as_text() -> None:
    assert str(Case(2, (128, 32, 128), (512,))) == "2 layers, 1 x 32, 2 x 128, ring of 512"
    assert str(Case(1, (64,))) == "1 layer, 1 x 64"
    assert str(Case(1, ring=(64, 64))) == "1 layer, 2 rings of 64"


def test_forward_and_backward_together() -> None:
    assert Timing(1.0, 2.5, 0.0).total_s == 3.5
