"""The lengths of the sequences of each step, from wherever a recipe takes them. The one place that does.

Letters: N documents, S sequences of a step. Lengths are inputs (tokens).
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from engine.config.schema import Config
from engine.data.files import kind, reading
from engine.data.index import build_index
from engine.data.mixes import draw
from engine.data.steps import Cursor, fitting, next_step, piece_bounds
from engine.errors import DataError, Problem
from engine.planner.plan import Ints

_SHOWN = 10  # wrong lines that are told one by one
_MOST = 2**32  # tokens; what is longer is a mistake, not a document


def step_lengths(config: Config, steps: int) -> Iterator[Ints]:
    """Yield the sequence lengths [S] of each step, as `lengths` says: the recipe's documents, a file, or a named mix.

    Raises DataError for documents or a file that cannot be used.
    """
    source = config.lengths
    if source.name == "data":
        yield from _of_documents(config, steps)
    elif source.name == "file":
        documents = read_lengths(Path(str(source.path)))
        yield from islice(packed(documents, config.batch_tokens, config.context), steps)
    else:
        for step in range(steps):
            yield draw(source, config.batch_tokens, config.context, config.run.seed, step)


def packed(documents: Ints, batch_tokens: int, context: int) -> Iterator[Ints]:
    """Yield the sequence lengths [S] of steps without end, from the lengths of documents [N], in their order.

    A step takes documents until the next would pass `batch_tokens`, and at least one; they are cut at `context`. After
    the last document the first follows.
    """
    start, rounds = 0, batch_tokens // int(documents.sum())
    while True:
        ahead = np.tile(np.roll(documents, -start), rounds + 1)
        count = fitting(ahead, batch_tokens)
        yield piece_bounds(ahead[:count], context)[2]
        start = (start + count) % len(documents)


def read_lengths(path: Path) -> Ints:
    """Return the lengths of documents [N] in a file: text with a whole number a line, or a .npy array of integers.

    In text `#` begins a comment, and blank lines do not count. Raises DataError, which names the first ten wrong lines,
    and for a file that is missing, unreadable or holds no length.
    """
    found = kind(path)
    if found != "file":
        message = "there is no such file" if found == "missing" else "is a folder, not a file"
        raise DataError(message, key=str(path), hint="set lengths.path to a file of one length a line")
    lengths = _read_array(path) if path.suffix == ".npy" else _read_text(path)
    if len(lengths) == 0:
        raise DataError("holds no length", key=str(path), hint="write one whole number of tokens a line")
    return lengths


def _of_documents(config: Config, steps: int) -> Iterator[Ints]:
    """Yield what training would take: its documents, in its order."""
    index, cursor = build_index(config.data), Cursor()
    for _ in range(steps):
        table, cursor = next_step(index, cursor, config.run.seed, config.batch_tokens, config.context)
        yield table.length


def _read_text(path: Path) -> Ints:
    lengths: list[int] = []
    wrong: list[Problem] = []
    with reading(path) as file:
        for number, line in enumerate(file, start=1):
            text = line.removeprefix(BOM_UTF8).split(b"#", 1)[0].strip()
            if not text:
                continue
            fault = _fault(text)
            if fault is None:
                lengths.append(int(text))
            else:
                wrong.append(Problem(fault, f"{path}:{number}"))
    _refuse(path, wrong)
    return np.array(lengths, dtype=np.int64)


def _fault(text: bytes) -> str | None:
    """Return what is wrong with a line, or None."""
    digits = text.removeprefix(b"-")
    if not digits.isdigit():
        shown = text[:40].decode("utf-8", "replace")
        return f"{shown!r} is not a whole number of tokens"
    if len(digits) > 10 or int(digits) > _MOST:
        return f"{text[:40].decode()} tokens are more than the largest length, {_MOST}"
    return None if int(text) > 0 else f"a length is at least 1, not {int(text)}"


def _read_array(path: Path) -> Ints:
    with reading(path) as file:
        try:
            array = np.lib.format.read_array(file, allow_pickle=False)
        except (ValueError, EOFError) as error:
            message = "is not an array that numpy reads"
            raise DataError(message, key=str(path), hint="write it with numpy.save") from error
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        message = f"holds {array.dtype} of shape {array.shape}, not integers in one row"
        raise DataError(message, key=str(path), hint="save an int64 array of shape [N]")
    places = np.flatnonzero((array < 1) | (array > _MOST)).tolist()
    faults = (_fault(str(array[place]).encode()) for place in places)
    _refuse(path, [Problem(str(fault), f"{path}[{place}]") for place, fault in zip(places, faults, strict=True)])
    return array.astype(np.int64)


def _refuse(path: Path, wrong: list[Problem]) -> None:
    """Raise one DataError that names the first wrong lines, and how many more there are."""
    if not wrong:
        return
    first, more = wrong[:_SHOWN], len(wrong) - _SHOWN
    if more > 0:
        first.append(Problem(f"{more} more are wrong", str(path)))
    if len(first) == 1:
        first = [Problem(wrong[0].message, wrong[0].key, "write one whole number of tokens a line")]
    error = DataError(first[0].message, key=first[0].key)
    error.problems = tuple(first)
    raise error
