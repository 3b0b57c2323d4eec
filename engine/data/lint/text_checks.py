"""Finds artefacts of web crawls and wrong conversions that a model would learn, for `data lint`."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from engine.units import Ints

RUN = 1000  # characters, or token ids, that are equal and follow each other
_REPLACED = 3  # U+FFFD of a text, if they are also one of 1,000 characters
_PAIRS = 3  # sequences of mojibake of a text, if they are different, too

# A byte of UTF-8 that was read as Latin-1, or as Windows-1252, which has other characters for 0x80 to 0x9f.
_NEXT = "\u0080-\u00bf" + "".join(
    bytes([byte]).decode("cp1252") for byte in range(0x80, 0xA0) if byte not in (0x81, 0x8D, 0x8F, 0x90, 0x9D)
)
# Leads of two bytes are those of alphabets in use: no "CAFÉ®". No squared ångström, nor halves: "Å²", "8×½".
_MOJIBAKE = re.compile(
    f"[\u00c2-\u00c4\u00ce-\u00d1\u00d9][{_NEXT}]|[\u00c5\u00d8\u00d7](?![¹²³¼½¾])[{_NEXT}]"
    f"|[\u00e0-\u00ef][{_NEXT}]{{2}}|[\u00f0-\u00f4][{_NEXT}]{{3}}"
)
_HIGH = re.compile(f"[\u00c0-\u00ff{_NEXT}]")


def suspicious(text: str) -> Iterator[tuple[str, str]]:
    """Yield suspicious properties of a text, as keys of `engine.data.lint.findings.CHECKS` and details."""
    if place := text.find("\0") + 1:
        yield "L11", f"contains NUL at character {place - 1}"
    run, start = longest_run(text)
    if run >= RUN:
        yield "L13", f"repeats {text[start]!r} {run:,} times from character {start} on"
    if text.isascii():
        return
    replaced = text.count("\ufffd")
    if replaced >= _REPLACED and replaced * 1000 >= len(text):
        yield "L09", f"contains U+FFFD {replaced:,} times in {len(text):,} characters"
    if sequence := mojibake(text):
        meant = _bytes(sequence).decode("utf-8", "replace")
        yield "L10", f"contains {sequence!r}, which is {meant!r} in UTF-8 that was read in another encoding"
    if place := text.find("\ufeff") + 1:
        yield "L12", f"contains a byte order mark, U+FEFF, at character {place - 1}"


def mojibake(text: str) -> str:
    """Return the first sequence of a text that is UTF-8 read as Latin-1 or Windows-1252, if that is certain; else "".

    Single sequences occur in good texts, as the end of "AMANHÃ…". It is certain if there are three, not all the same,
    and nine of ten characters of those encodings are in one: in a good text, most letters with accents are followed by
    others, and most quotation marks follow none.
    """
    sequences = [found.group() for found in _MOJIBAKE.finditer(text)]
    if len(sequences) < _PAIRS or len(set(sequences)) < 2:
        return ""
    inside = sum(map(len, sequences))
    return sequences[0] if inside >= 0.9 * sum(1 for _ in _HIGH.finditer(text)) else ""


def _bytes(sequence: str) -> bytes:
    """Return the bytes of a sequence that was read as Latin-1 or Windows-1252."""
    return b"".join(one.encode("latin-1" if ord(one) < 256 else "cp1252") for one in sequence)


def longest_run(text: str) -> tuple[int, int]:
    """Return the length of the longest run of a character and where it begins, if it is `RUN` or more; else (0, 0).

    Such a run has a character at a multiple of `RUN`: only those are looked at.
    """
    longest, at, stop = 0, 0, 0
    for position in range(0, len(text), RUN):
        character = text[position]
        if position < stop or character * 2 not in text[max(0, position - 1) : position + 2]:
            continue
        before = text[max(0, position - RUN) : position]
        start = position - (len(before) - len(before.rstrip(character)))
        stop = position + 1
        while (piece := text[stop : stop + RUN]) and piece == character * len(piece):
            stop += len(piece)
        stop += len(piece) - len(piece.lstrip(character))
        if stop - start > longest:
            longest, at = stop - start, start
    return (longest, at) if longest >= RUN else (0, 0)


def longest_run_of_ids(ids: Ints) -> tuple[int, int]:
    """Return the length of the longest run of an id in `ids` [n], and where it begins; (0, 0) without ids."""
    if not len(ids):
        return 0, 0
    starts = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]]))
    lengths = np.diff(np.append(starts, len(ids)))
    return int(lengths.max()), int(starts[lengths.argmax()])
