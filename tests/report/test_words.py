from __future__ import annotations

import pytest

from engine.config.load import load
from engine.report.words import cell, hdp_ranks, long_seconds, number, short_seconds, short_tokens, source


@pytest.mark.parametrize(
    ("tokens", "text"), [(7, "7"), (1023, "1023"), (1024, "1K"), (1536, "1.5K"), (2 * 1024**2, "2M")]
)
def test_tokens_in_a_few_letters(tokens: int, text: str) -> None:
    assert short_tokens(tokens) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 µs"), (3e-6, "3 µs"), (0.0125, "12.5 ms"), (1.0, "1 s"), (215.97, "216 s"), (12345.6, "12,346 s")],
)
def test_seconds_in_a_unit_that_fits(seconds: float, text: str) -> None:
    assert short_seconds(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0123, "0.012 s"),
        (42.4, "42 s"),
        (59.7, "1 min"),
        (425, "7 min 5 s"),
        (3599.8, "1 h"),
        (12_000, "3 h 20 min"),
        (187_200, "2 d 4 h"),
    ],
)
def test_durations_as_people_say_them(seconds: float, text: str) -> None:
    assert long_seconds(seconds) == text


def test_numbers_and_facts_as_tables_have_them() -> None:
    assert [number(value) for value in (1234567, 0.98765, 12345.6, "adaptive")] == [
        "1,234,567",
        "0.988",
        "12,346",
        "adaptive",
    ]
    assert cell({"ring_bytes": 3 * 2**30}, "ring_bytes") == "3.000"
    assert cell({"tokens": 3000}, "tokens") == "3,000"


def test_the_source_of_lengths() -> None:
    assert source(load([])) == "data.path=stdlib-lines"
    assert source(load(["lengths=github"])) == "lengths=github"
    assert source(load(["lengths=file", "lengths.path=a.txt"])) == "lengths.path=a.txt"


def test_hdp_ranks_are_distinguished_from_devices() -> None:
    assert hdp_ranks(2, 1, 1) == "2 ranks"
    assert hdp_ranks(256, 8, 4) == "256 HDP ranks of 32 devices (tp 8 x pp 4)"
