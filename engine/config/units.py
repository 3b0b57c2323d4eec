"""Lengths, sizes and counts as people write them: 16K, 2M, 80GiB, 1 step. K is 1024 for tokens and for bytes."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated

from pydantic import BeforeValidator, Field

_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(iB|B)?\s*", re.IGNORECASE)


def parse_count(value: object, *, bytes_: bool = False) -> int:
    """Return tokens (or bytes) of a number or of text such as `16K`, `1.5M` or, for bytes, `80GiB`.

    Raises ValueError when it is not such a number, or not a whole number of tokens.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(_expected(value, bytes_))
    match = _NUMBER.fullmatch(str(value))
    if match is None or (match[3] and not bytes_):
        raise ValueError(_expected(value, bytes_))
    count = Fraction(match[1]) * 1024 ** _POWERS[match[2].upper()]
    if count.denominator != 1:
        raise ValueError(f"{value} is not a whole number of {'bytes' if bytes_ else 'tokens'}")
    if count >= 2**63:
        raise ValueError(f"{value} is more than 64 bits hold")
    return int(count)


def format_count(count: int) -> str:
    """Return tokens as people write them: 2097152 -> `2M`, 1500 -> `1500`."""
    for unit in ("T", "G", "M", "K"):
        size = 1024 ** _POWERS[unit]
        if count and count % size == 0:
            return f"{count // size}{unit}"
    return str(count)


def format_bytes(count: int, digits: int = 1) -> str:
    """Return bytes as people write them, by default to a tenth of a unit: 5.2 GiB, 1.0 KiB, 12 bytes."""
    for power in (4, 3, 2, 1):
        if count >= 1024**power:
            return f"{count / 1024**power:,.{digits}f} {'KMGT'[power - 1]}iB"
    return counted(count, "byte")


def format_apart(one: int, other: int) -> tuple[str, str]:
    """Return two sizes as people write them, with as many digits as show which is larger: 80.02 GiB and 80.00 GiB."""
    texts = [(format_bytes(one, digits), format_bytes(other, digits)) for digits in range(1, 14)]
    return next((pair for pair in texts if pair[0] != pair[1]), texts[0])


def counted(number: int, noun: str) -> str:
    """Return a number of things as people write it: 1 step, 2 steps, 1,500 documents."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _expected(value: object, bytes_: bool) -> str:
    examples = "80GiB or 512M" if bytes_ else "4096, 16K or 2M"
    return f"{value!r} is not a {'size' if bytes_ else 'length'}; write {examples}"


def _parse_bytes(value: object) -> int:
    return parse_count(value, bytes_=True)


Tokens = Annotated[int, BeforeValidator(parse_count), Field(examples=["16K"])]
Bytes = Annotated[int, BeforeValidator(_parse_bytes), Field(examples=["80GiB"])]
