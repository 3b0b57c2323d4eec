"""Reads and writes lengths, sizes and counts: 16K, 2M, 80GiB, 1 step. K is 1024 for tokens and for bytes."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import partial
from typing import Annotated, get_args

from pydantic import BeforeValidator, Field
from pydantic.fields import FieldInfo

_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_LONGEST = 40  # characters of a number
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(iB|B)?\s*", re.IGNORECASE)


def parse_count(value: object, *, bytes_: bool = False) -> int:
    """Read tokens (or bytes) from a number or a text such as `16K`, `1.5M` or, for bytes, `80GiB`.

    Raises ValueError if it is not a number of this form, not whole, or does not fit in 64 bits.
    """
    is_number = isinstance(value, (int, float, str)) and not isinstance(value, bool)
    if (isinstance(value, int) and abs(value) >= 2**63) or (isinstance(value, str) and len(value) > _LONGEST):
        raise ValueError("it does not fit in 64 bits")
    match = _NUMBER.fullmatch(str(value)) if is_number else None
    if match and match[3] and not bytes_:
        raise ValueError(f"{value!r} is not a length in tokens, but a size in bytes; write 4096, 16K or 2M")
    if match is None:
        noun, examples = ("size", "80GiB or 512M") if bytes_ else ("length", "4096, 16K or 2M")
        raise ValueError(f"{value!r} is not a {noun}; write {examples}")
    count = Fraction(match[1]) * 1024 ** _POWERS[match[2].upper()]
    if count.denominator != 1:
        raise ValueError(f"{value} is not a whole number of {'bytes' if bytes_ else 'tokens'}")
    if count >= 2**63:
        raise ValueError(f"{value} does not fit in 64 bits")
    return int(count)


def format_count(count: int, *, bytes_: bool = False) -> str:
    """Write tokens (or bytes) in the largest unit that is exact: 2097152 as `2M` (or `2MiB`), 1500 as `1500`."""
    for unit in ("T", "G", "M", "K"):
        size = 1024 ** _POWERS[unit]
        if count and count % size == 0:
            return f"{count // size}{unit}" + ("iB" if bytes_ else "")
    return str(count)


def format_bytes(count: int, digits: int = 1) -> str:
    """Write bytes with a unit and `digits` decimals: 5.2 GiB, 1.0 KiB, 12 bytes."""
    for power in (4, 3, 2, 1):
        if count >= 1024**power:
            return f"{count / 1024**power:,.{digits}f} {'KMGT'[power - 1]}iB"
    return counted(count, "byte")


def format_apart(*sizes: int) -> tuple[str, ...]:
    """Write sizes with enough decimals to show which is larger: 80.02 GiB and 80.00 GiB. Equal sizes get one."""
    texts = [tuple(format_bytes(size, digits) for size in sizes) for digits in range(1, 14)]
    return next((each for each in texts if len({*each}) == len({*sizes})), texts[0])


def counted(number: int, noun: str) -> str:
    """Write a number with its noun: 1 step, 2 steps, 1,500 documents."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


_TOKENS, _BYTES = BeforeValidator(parse_count), BeforeValidator(partial(parse_count, bytes_=True))
Tokens = Annotated[int, _TOKENS, Field(examples=["16K"])]
Bytes = Annotated[int, _BYTES, Field(examples=["80GiB"])]


def unit_of(field: FieldInfo) -> str | None:
    """Return "tokens" or "bytes" if a config's field, or a member of its union, is a number of them, else None."""
    metadata = [
        *field.metadata,
        *(one for kind in get_args(field.annotation) for one in getattr(kind, "__metadata__", ())),
    ]
    return "tokens" if _TOKENS in metadata else "bytes" if _BYTES in metadata else None


def format_of(field: FieldInfo, count: int) -> str:
    """Write a value of a config's field as a user does: with a unit if it is a number of tokens or bytes."""
    unit = unit_of(field)
    return format_count(count, bytes_=unit == "bytes") if unit else str(count)
