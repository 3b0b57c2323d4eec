from __future__ import annotations

import pytest

from engine.config.units import counted, format_apart, format_bytes, format_count, parse_count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (7, 7),
        (4096.0, 4096),
        ("16K", 16384),
        ("16k", 16384),
        (" 2 M ", 2 << 20),
        ("1.5K", 1536),
        ("2G", 2 << 30),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_tokens(text: object, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(("text", "count"), [("80GiB", 80 << 30), ("512MB", 512 << 20), ("1K", 1024), (5, 5)])
def test_bytes(text: object, count: int) -> None:
    assert parse_count(text, bytes_=True) == count


@pytest.mark.parametrize(
    "text", ["", "K", "-1", "4X", "80GiB", "1,000", True, None, [1], "0.3K", 1.5, "8192P", "9" * 40]
)
def test_what_is_no_length_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"is not|does not fit"):
        parse_count(text)


@pytest.mark.parametrize(("count", "text"), [(0, "0"), (1500, "1500"), (2048, "2K"), (3 << 20, "3M"), (1 << 40, "1T")])
def test_format(count: int, text: str) -> None:
    assert format_count(count) == text
    assert parse_count(text) == count


@pytest.mark.parametrize(("number", "text"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (1500, "1,500 steps")])
def test_counted(number: int, text: str) -> None:
    assert counted(number, "step") == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1,023 bytes"),
        (1536, "1.5 KiB"),
        (5 << 29, "2.5 GiB"),
        (5 << 60, "5,242,880.0 TiB"),
    ],
)
def test_bytes_are_written_in_the_unit_that_shows_them(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("one", "other", "texts"),
    [
        (88 << 30, 80 << 30, ("88.0 GiB", "80.0 GiB")),
        ((192 << 30) + (20 << 20), 192 << 30, ("192.02 GiB", "192.00 GiB")),
        ((1 << 50) + 1, 1 << 50, ("1,024.000000000001 TiB", "1,024.000000000000 TiB")),
        (1 << 50, 1 << 50, ("1,024.0 TiB", "1,024.0 TiB")),
    ],
)
def test_two_sizes_have_the_digits_that_tell_them_apart(one: int, other: int, texts: tuple[str, str]) -> None:
    assert format_apart(one, other) == texts
