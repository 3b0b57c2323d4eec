"""Measures the lengths of all documents of a source, or of a sample, in several processes.

Training needs every document, in order, with its tokens (parts.py). Statistics need only lengths, in any order, and a
sample is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from engine.config import schema
from engine.data.parts import Tokens
from engine.data.sources.formats import FORMATS
from engine.data.sources.notes import notes, nothing_to_train
from engine.data.sources.source import Block, usable, with_transform
from engine.data.token_file import TokenFile
from engine.data.transforms.piece import Piece
from engine.data.transforms.transforms import transformed
from engine.data.workers import cores, in_processes
from engine.errors import DataError
from engine.units import Floats, Ints

Progress = Callable[[float], None]  # gets the fraction of the work that is done, 0 to 1


@dataclass(frozen=True, eq=False)
class Documents:
    """Lengths of non-empty documents, in inputs. `empty` counts the empty ones, and `dropped` those left out by a
    transform. All cover `fraction` of the source."""

    lengths: Ints  # [N]
    empty: int = 0
    fraction: float = 1.0
    dropped: int = 0
    shares: Floats | None = None  # [N] of a mixture: how many documents each one represents; None: one

    @property
    def counts(self) -> Floats:
        """How many documents each one represents, [N]. Together they have the tokens that were read."""
        return np.ones(len(self.lengths)) if self.shares is None else self.shares

    @property
    def tokens(self) -> int:
        """Tokens that were read."""
        return int(self.lengths.sum())


def scan(
    data: schema.Data,
    sample: int | None,
    seed: int,
    progress: Progress = lambda done: None,
    say: Callable[[str], None] = lambda line: None,
    vocabulary: int | None = None,
) -> Documents:
    """Measure the documents of a source, or about `sample` of them, chosen at random with `seed`.

    Without `sample`, a folder of up to 100,000 files, or other files of up to 1 GiB, are read completely, and a random
    sample of this size from a larger one. (Of 100,000 documents, 100 are longer than the 99.9th percentile.) `progress`
    is called after each block, `say` gets the lines of `notes` for a model with `vocabulary`. Raises DataError for an
    invalid document, or if all documents are empty.
    """
    if data.format == "tokens":
        tokens = TokenFile.open(Path(data.paths[0]))
        stored = tokens.lengths(0, len(tokens)) - 1
        return Documents(stored[stored > 0], int((stored < 1).sum()))
    chosen, fraction = FORMATS[data.format].sample(data, sample, seed)
    blocks = with_transform(chosen, data)
    for line in notes(data, blocks, vocabulary):
        say(line)
    inputs, dropped = list[int](), 0
    hint = "read fewer documents with --sample, or close other programs"
    for done, found in enumerate(in_processes(partial(_inputs, Tokens.of(data)), blocks, cores(), hint), start=1):
        inputs, dropped = inputs + found[0], dropped + found[1]
        progress(done / len(blocks))
    lengths = np.array(inputs, dtype=np.int64)
    if not lengths.any() and dropped:
        raise nothing_to_train(data.path_text, blocks, 0, dropped=dropped)
    if not lengths.any():
        message = f"every document ({len(lengths):,}) is empty" if inputs else "contains no documents"
        raise DataError(message, key=data.path_text, hint="set data.path to documents with text")
    return Documents(lengths[lengths > 0], int((lengths == 0).sum()), fraction, dropped)


def mixed(found: Mapping[str, Documents], weights: Mapping[str, int]) -> Documents:
    """Return the documents of a mixture, in which the tokens of sources are in proportion to `weights`.

    A document of a source with few tokens and a large weight represents several, because it is repeated in training.
    Sources without a weight are left out. A single source is returned unchanged.
    """
    chosen = {name: one for name, one in found.items() if weights.get(name)}
    if len(chosen) == 1:
        return next(iter(chosen.values()))
    read, summed = sum(one.tokens for one in chosen.values()), sum(weights[name] for name in chosen)
    counts = [np.full(len(one.lengths), weights[name] / summed * read / one.tokens) for name, one in chosen.items()]
    return Documents(
        lengths=np.concatenate([one.lengths for one in chosen.values()]),
        empty=sum(one.empty for one in chosen.values()),
        fraction=read / sum(one.tokens / one.fraction for one in chosen.values()),
        dropped=sum(one.dropped for one in chosen.values()),
        shares=np.concatenate(counts),
    )


def _inputs(tokens: Tokens, block: Block) -> tuple[list[int], int]:
    """Return the length of each document of a block in inputs, 0 for an empty one, and how many a transform drops."""
    tokenizer, lengths, dropped = tokens.open(), list[int](), 0

    def inputs_of(piece: Piece) -> int:
        """Ids need not be in the vocabulary, because only lengths are needed."""
        ids = piece.document.ids
        return piece.inputs if ids is None else max(0, len(ids) - 1)

    for document in usable(block):
        try:
            pieces, left_out, _ = transformed(document, block.transform, tokenizer)
            lengths += map(inputs_of, pieces)
        except DataError as error:
            (problem,) = error.problems
            raise DataError(problem.message, key=block.where(document.place), hint=problem.hint) from error
        dropped += left_out
    return lengths, dropped
