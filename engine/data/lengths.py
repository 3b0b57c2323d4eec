"""Lengths of documents and sequences from the source that `lengths` names: the recipe's data, a file, or a mix.

Letters: N documents, S sequences of a step. Lengths are numbers of inputs (tokens).
"""

from __future__ import annotations

import math
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.random import Generator, Philox

from engine.config.schema import Config
from engine.config.sources import of_source, source_configs
from engine.data.mixes import MIXES, draw
from engine.data.mixture import SCALE, segments_of, weights_at
from engine.data.overview import Corpora
from engine.data.scan import Documents, Progress, scan
from engine.data.sequences import fitting, piece_bounds
from engine.data.sources.files import kind, reading
from engine.data.steps import Cursor
from engine.data.tokenizers.load import check_weights
from engine.errors import ConfigError, DataError, Problem
from engine.units import Ints

Say = Callable[[str], None]
_DRAWN = 1 << 20  # documents to draw from a mix
_SHOWN, _MOST_WRONG = 10, 10_000  # invalid lines that an error lists, and that are counted
_LONGEST_LINE = 1 << 16  # bytes
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_MOST = 2**32  # tokens; larger numbers are errors


def step_lengths(config: Config, steps: int, say: Say = lambda line: None) -> Iterator[Ints]:
    """Yield the sequence lengths, int64 [S], of each of the first `steps` steps.

    With the recipe's own data they are exactly those of training; fewer, if its documents are used up before. Blocks of
    documents are packed when they are needed, and `say` gets lines of progress. Raises DataError for unusable documents
    or lengths.
    """
    source = config.lengths
    if source.name == "data":
        try:
            corpora, cursor = Corpora(config), Cursor()
            corpora.pack_first(cursor, say)
        except DataError as error:
            other = "to plan without documents, set lengths=github"
            error.problems = tuple(
                replace(one, hint=f"{one.hint}; {other}" if one.hint else other) for one in error.problems
            )
            raise
        for _ in range(steps):
            if (found := corpora.next(cursor)) is None:
                return
            table, cursor = found
            yield table.length
    elif source.name == "file":
        documents = read_lengths(Path(str(source.path)))
        yield from islice(packed(documents, config.batch_tokens, config.context), steps)
    else:
        for step in range(steps):
            yield draw(source, config.batch_tokens, config.context, config.run.seed, step)


def corpus_tokens(config: Config) -> int | None:
    """Return the tokens of all documents that `step_lengths` takes turns through; None if they are many, or drawn.

    The config's own documents must have been packed, as `step_lengths` does.
    """
    if config.lengths.name == "data":
        return Corpora(config).tokens
    return int(read_lengths(Path(str(config.lengths.path))).sum()) if config.lengths.name == "file" else None


def document_lengths(
    config: Config, sample: int | None, progress: Progress = lambda done: None, say: Say = lambda line: None
) -> dict[str, Documents]:
    """Return document lengths for statistics: of each source of the config's data, of a file, or 1M drawn from a mix.

    The key is the name of the source; of a file or a mix, that of `lengths`. With `sample`, about that many documents
    are read from each source or drawn; a file of lengths refuses it with a ConfigError. `progress` is called with the
    fraction of the scan that is done, `say` with lines about the source. Raises DataError for a source that cannot be
    used.
    """
    source = config.lengths
    if source.name == "data":
        sources, found = source_configs(config.data), dict[str, Documents]()
        for name, one in sources.items():

            def of_all(done: float, before: int = len(found)) -> None:
                progress((before + done) / len(sources))

            if one.format != "tokens":
                check_weights(config)
            with of_source(config.data, name):
                found[name] = scan(one, sample, config.run.seed, of_all, say, config.model.vocab)
        return found
    if source.name == "file":
        if sample is not None:
            raise ConfigError("a file of lengths is always read completely", key="--sample", hint="remove --sample")
        return {source.name: Documents(read_lengths(Path(str(source.path))))}
    random = Generator(Philox(key=config.run.seed))
    return {source.name: Documents(MIXES[source.name](random, source, sample or _DRAWN))}


def source_weights(config: Config) -> dict[str, int]:
    """Return the weights of sources, by the names of `document_lengths`, in 1/SCALE: those of the first step."""
    if config.lengths.name != "data":
        return {config.lengths.name: SCALE}
    return weights_at(segments_of(config.data), 0, 0)


def example_step(config: Config, found: Documents) -> Ints:
    """Return the sequence lengths, int64 [S], of one step.

    For a file or a mix, it is the first step of `bytescale plan`. For the config's own data, it takes the `found`
    documents in random order, because training would tokenize whole windows of blocks. Of a mixture, they are drawn in
    the shares of their sources.
    """
    if config.lengths.name != "data":
        return next(step_lengths(config, 1))
    # Random order, because documents of one folder often have similar lengths.
    random, shares = Generator(Philox(key=config.run.seed)), found.shares
    if shares is None:
        chosen = random.permutation(found.lengths)
    else:
        chosen = random.choice(found.lengths, _DRAWN, p=shares / shares.sum())
    return next(islice(packed(chosen, config.batch_tokens, config.context), 1))


def packed(documents: Ints, batch_tokens: int, context: int) -> Iterator[Ints]:
    """Yield the sequence lengths, int64 [S], of one step after another, without end.

    `documents` [N] are the lengths of the documents, which are taken in order and repeated after the last. A step takes
    documents until the next one would exceed `batch_tokens`, but at least one. Documents are split at `context`.
    """
    # A step may contain all documents several times; `rounds + 1` copies, from `start` on, always suffice.
    start, rounds = 0, batch_tokens // int(documents.sum())
    while True:
        ahead = np.tile(np.roll(documents, -start), rounds + 1)
        count = fitting(ahead, batch_tokens)
        yield piece_bounds(ahead[:count], context)[2]
        start = (start + count) % len(documents)


def read_lengths(path: Path) -> Ints:
    """Read document lengths [N] from a text file with one whole number per line, or from a .npy array of integers.

    In text, `#` starts a comment and blank lines are skipped. Raises DataError for invalid lines, of which it lists the
    first ten, and for a file that is missing, unreadable or contains no lengths.
    """
    found = kind(path)
    if found != "file":
        message = "no such file" if found == "missing" else "is a folder, not a file"
        raise DataError(message, key=str(path), hint="set lengths.path to a file with one length per line")
    lengths = _read_array(path) if path.suffix == ".npy" else _read_text(path)
    if len(lengths) == 0:
        raise DataError("contains no lengths", key=str(path), hint="write one whole number of tokens per line")
    return lengths


def _read_text(path: Path) -> Ints:
    lengths: list[int] = []
    wrong: list[Problem] = []
    with reading(path) as file:
        # A file of another format may be one long line.
        for number, line in enumerate(iter(partial(file.readline, _LONGEST_LINE), b""), start=1):
            text = line.removeprefix(BOM_UTF8).split(b"#", 1)[0].strip()
            if not text:
                continue
            fault = _fault(text)
            if fault is None:
                lengths.append(int(text))
            else:
                wrong.append(Problem(fault, f"{path}:{number}"))
                if len(wrong) == _MOST_WRONG:
                    break
    _refuse(path, wrong)
    return np.array(lengths, dtype=np.int64)


def _read_array(path: Path) -> Ints:
    with reading(path) as file:
        try:
            # A header may promise more numbers than there are, and reading would allocate all of them.
            read_header = _HEADERS[np.lib.format.read_magic(file)]
            shape, _, dtype = read_header(file)
            if math.prod(shape) * dtype.itemsize > path.stat().st_size:
                raise ValueError("the file is cut short")
            file.seek(0)
            array = np.lib.format.read_array(file, allow_pickle=False)
        except (OSError, MemoryError):
            raise
        except Exception as error:  # its parsers of headers raise many kinds
            raise DataError("is not a numpy array", key=str(path), hint="write it with numpy.save") from error
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        message = f"contains {array.dtype} of shape {array.shape}, not a 1-D array of integers"
        raise DataError(message, key=str(path), hint="save an int64 array of shape [N]")
    places = np.flatnonzero((array < 1) | (array > _MOST)).tolist()
    _refuse(path, [Problem(str(_fault(str(array[place]).encode())), f"{path}[{place}]") for place in places])
    return array.astype(np.int64)


def _fault(text: bytes) -> str | None:
    """Return the error in a length, or None if it is valid."""
    digits = text.removeprefix(b"-")
    if not digits.isdigit():
        return f"{text[:40].decode('utf-8', 'replace')!r} is not a whole number of tokens"
    if len(digits) > 10 or int(digits) > _MOST:  # int() raises an error for thousands of digits
        return f"{text[:40].decode()} tokens exceed the largest length, {_MOST}"
    return None if int(text) > 0 else f"a length is at least 1, not {int(text)}"


def _refuse(path: Path, wrong: list[Problem]) -> None:
    """Raise a DataError that lists the first invalid lines and the number of others; do nothing if there are none."""
    if wrong:
        wrong[0] = replace(wrong[0], hint="write one whole number of tokens per line")
        more = len(wrong) - _SHOWN
        others = [Problem(f"{more} more invalid lengths", str(path))] if more > 0 else []
        raise DataError.of([*wrong[:_SHOWN], *others])
