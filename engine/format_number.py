"""Format numbers of the files that outlive a program: configs, checkpoints, token files, calibrations, ledgers.

A file that a program of an earlier format has written stays readable. One of a later format is rejected as a whole:
what it means cannot be guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import DataError
from engine.readers import Refusal

FIRST = 1  # the first formats have no number


def format_number(
    values: Mapping[str, Any], newest: int, place: str, error: Refusal = DataError, *, key: str = "format"
) -> int:
    """Return the format number of a file with these values, `FIRST` if it has none.

    `newest` is the last format that this program reads. Raises `error` for a later format, and for a number that no
    format has.
    """
    found = values.get(key, FIRST)
    if type(found) is not int or found < FIRST:
        message = f"has the {key} {_shown(found)}, and formats are numbered from {FIRST}"
        raise error(message, key=place, hint="restore this file from a copy")
    if found > newest:
        message = f"has format {found}, of a newer ByteScale; this one reads formats up to {newest}"
        raise error(message, key=place, hint="use the ByteScale that wrote it, or a newer one")
    return found


def _shown(found: object) -> str:
    text = repr(found)
    return text if len(text) <= 60 else f"{text[:60]}..."
