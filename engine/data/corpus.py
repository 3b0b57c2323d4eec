"""The documents of a source, in blocks of tokens: those of a token file, or of texts that are packed when needed.

A document of t tokens has t - 1 inputs: its last token is only a label. With BOS and EOS, a text of n tokens has n + 1
inputs. Letters: B blocks of a source, D documents of a block.
"""

from __future__ import annotations

import posixpath
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.data.blocks.blocks import BlockId, Blocks, Lengths, Range, Slice, changed
from engine.data.blocks.packed import Packed
from engine.data.blocks.texts import Texts
from engine.data.sources.source import Block
from engine.data.sources.urls import is_url
from engine.data.token_facts import blocks_path, hashes_path, parts_path, read_facts
from engine.data.token_file import Numbers, TokenFile
from engine.errors import DataError
from engine.units import Ints

_HASH_BYTES = 16
_BLOCK = 256  # documents of a block of another tool's token file
_ENDS = 1 << 16  # bytes at the end of a file of another tool that its fingerprint covers


class Corpus(Protocol):
    """The documents of one source, in blocks."""

    name: str
    place: str  # for messages
    blocks: int
    share: float  # of the documents that are for validation

    @property
    def fingerprint(self) -> str:
        """Hash of what decides the documents and their tokens, without reading them."""
        ...

    @property
    def vocabulary(self) -> int | None:
        """Number of tokens of the tokenizer; None for the token file of another tool."""
        ...

    @property
    def kind(self) -> str | None:
        """Kind of the tokenizer; None for the token file of another tool."""
        ...

    @property
    def ends(self) -> tuple[int | None, int | None]:
        """BOS and EOS of the tokenizer; None if it has none, or is not known."""
        ...

    def size(self, block: int) -> int:
        """Return the bytes of a block, about, without reading it."""
        ...

    def lengths(self, block: int) -> Lengths:
        """Return the lengths of a block. Raises DataError and StorageError as `Blocks.lengths`."""
        ...

    def slices(self, wanted: Sequence[Range]) -> list[Slice]:
        """Return the tokens of ranges of this source. Raises DataError and StorageError as `Blocks.slices`."""
        ...

    def token_file(self, block: int, document: int) -> tuple[str, int]:
        """Return the path of the file with the tokens of a document, and its number there, for messages."""
        ...

    def files(self, block: int) -> list[str]:
        """Return the files that the documents of a block are read from, for messages."""
        ...


class TokenCorpus:
    """The documents of a token file. The blocks of one of another tool have 256 documents each."""

    def __init__(self, name: str, prefix: Path, share: float) -> None:
        """Open PREFIX.bin and PREFIX.idx. Raises DataError if a file cannot be used."""
        self.name, self.place, self.share = name, str(prefix), share
        self.facts = read_facts(prefix)
        if self.facts is None and parts_path(prefix).exists():
            message, hint = "is not complete: packing it was interrupted", "run the same `bytescale data pack` again"
            raise DataError(message, key=str(prefix), hint=hint)
        self.tokens = TokenFile.open(prefix)
        self._hashes = self._table = None
        if self.facts is not None:
            self.tokens.check_mask(self.facts.masked)
            self._hashes, self._table = Numbers(hashes_path(prefix)), Numbers(blocks_path(prefix))
            hashes = self._hashes.size // 8
            if hashes != len(self.tokens):
                message = f"has {hashes:,} hashes for {len(self.tokens):,} documents"
                raise DataError(message, key=str(self._hashes.path), hint="pack the documents again")
            rows, rest = divmod(self._table.size, 16)
            ends = self._table.read("<i8", 1, max(0, rows - 1) * 16).tolist()
            if rest or ends != [len(self.tokens)]:
                message = f"does not fit a token file of {len(self.tokens):,} documents"
                raise DataError(message, key=str(self._table.path), hint="pack the documents again")
        self.blocks = -(-len(self.tokens) // _BLOCK) if self._table is None else self._table.size // 16 - 1

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all documents and their tokenizer; of sizes and the ends of the files, if another tool wrote them."""
        if self.facts is not None:
            return self.facts.contents
        found = blake2b(digest_size=_HASH_BYTES)
        for ending in (".idx", ".bin", *([".mask"] if self.tokens.mask else [])):
            with Path(f"{self.tokens.prefix}{ending}").open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - _ENDS))
                found.update(f"{size} ".encode() + file.read())
        return found.hexdigest()

    @property
    def vocabulary(self) -> int | None:
        return self.facts.vocabulary if self.facts else None

    @property
    def kind(self) -> str | None:
        return self.facts.tokenizer if self.facts else None

    @property
    def ends(self) -> tuple[int | None, int | None]:
        return (self.facts.bos, self.facts.eos) if self.facts else (None, None)

    def bounds(self, block: int) -> tuple[int, int]:
        """Return the first document of a block, and that of the next."""
        if self._table is None:
            return block * _BLOCK, min((block + 1) * _BLOCK, len(self.tokens))
        first, _, last, _ = self._table.read("<i8", 4, 16 * block).tolist()
        return first, last

    def find(self, document: int) -> tuple[int, int] | None:
        """Return the block of a document of the token file, and its number there; None if there is no such document."""
        if not 0 <= document < len(self.tokens):
            return None
        if self._table is None:
            return divmod(document, _BLOCK)
        firsts = self._table.read("<i8", 2 * self.blocks, 0)[::2]
        block = int(np.searchsorted(firsts, document, side="right")) - 1
        return block, document - int(firsts[block])

    def size(self, block: int) -> int:
        if self._table is not None:
            return int(self._table.read("<i8", 1, 16 * block + 8)[0])
        return int(self.tokens.lengths(*self.bounds(block)).sum()) * self.tokens.dtype.itemsize

    def lengths(self, block: int) -> Packed:
        return Packed(self.tokens, self._hashes, *self.bounds(block))

    def slices(self, wanted: Sequence[Range]) -> list[Slice]:
        return [self._slice(one) for one in wanted]

    def _slice(self, wanted: Range) -> Slice:
        if wanted.block >= self.blocks:
            raise changed(BlockId(self.name, wanted.block), wanted.document, [self.place])
        return self.lengths(wanted.block).read(wanted, self.files(wanted.block))

    def token_file(self, block: int, document: int) -> tuple[str, int]:
        return f"{self.place}.bin", self.bounds(block)[0] + document

    def files(self, block: int) -> list[str]:
        return [f"{self.place}.bin"]


class TextCorpus:
    """Documents of texts. Each block is packed into a small token file when it is first needed."""

    def __init__(self, name: str, share: float, texts: Texts, blocks: Blocks) -> None:
        self.name, self.place, self.share, self.blocks = name, texts.place, share, len(texts.blocks)
        self.texts, self.store = texts, blocks

    @property
    def vocabulary(self) -> int | None:
        return self.texts.tokens.open().vocabulary

    @property
    def kind(self) -> str:
        return self.texts.tokens.open().kind

    @property
    def ends(self) -> tuple[int | None, int | None]:
        tokenizer = self.texts.tokens.open()
        return tokenizer.bos, tokenizer.eos

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the names and sizes of all files, how they are read, and their tokenizer."""
        found = blake2b(self.texts.tokens.fingerprint.encode(), digest_size=_HASH_BYTES)
        folders = {posixpath.dirname(path) for block in self.texts.blocks for path in _absolute(block)}
        # Files may have been moved when a run is resumed, so the folder that has them all does not count.
        begin = 0 if not folders or any(map(is_url, folders)) else len(posixpath.commonpath(folders))
        for block in self.texts.blocks:
            names = [path[begin:] for path in _absolute(block)]
            found.update(repr((block.reading, names, block.size)).encode("utf-8", "surrogateescape"))
        return found.hexdigest()

    def size(self, block: int) -> int:
        return self.texts.blocks[block].size

    def lengths(self, block: int) -> Lengths:
        return self.store.lengths(BlockId(self.name, block))

    def slices(self, wanted: Sequence[Range]) -> list[Slice]:
        return self.store.slices(wanted)

    def token_file(self, block: int, document: int) -> tuple[str, int]:
        return f"{self.texts.part(block)}.bin", document

    def files(self, block: int) -> list[str]:
        return self.texts.blocks[block].files


def _absolute(block: Block) -> list[str]:
    """Return the normalised paths of a block's files; URLs unchanged."""
    return [path if path.startswith("/") or is_url(path) else str(Path(path).absolute()) for path in block.files]


def chosen_lengths(corpus: Corpus, block: int, documents: Ints, contents: NDArray[np.uint64]) -> Lengths:
    """Return the lengths of the block of documents [n] whose hashes were `contents` [n] when they were chosen.

    Raises DataError if the document of one of these numbers is another one now, as `Blocks.slices` does.
    """
    is_same = np.zeros(len(documents), dtype=np.bool_)
    if block < corpus.blocks:
        lengths = corpus.lengths(block)
        there = documents < len(lengths)
        is_same[there] = lengths.hash()[documents[there]] == contents[there]
        if is_same.all():
            return lengths
    files = corpus.files(block) if block < corpus.blocks else [corpus.place]
    raise changed(BlockId(corpus.name, block), int(documents[is_same.argmin()]), files)


class Reader:
    """Reads tokens for a model whose vocabulary has `vocabulary` tokens."""

    def __init__(self, corpora: Sequence[Corpus], vocabulary: int) -> None:
        self.names = [corpus.name for corpus in corpora]
        self._corpora = {corpus.name: corpus for corpus in corpora}
        self._stores = {name: one.store if isinstance(one, TextCorpus) else one for name, one in self._corpora.items()}
        self._vocabulary = vocabulary

    def read(self, wanted: Sequence[Range]) -> list[Slice]:
        """Read ranges of any sources: those of all texts in one call, those of a token file in another.

        Raises DataError for a token that is not in the vocabulary, and errors as `Blocks.slices`.
        """
        numbers_in = defaultdict[Corpus | Blocks, list[int]](list)
        for number, one in enumerate(wanted):
            numbers_in[self._stores[one.source]].append(number)
        found = dict[int, Slice]()
        for store, numbers in numbers_in.items():
            ranges = [wanted[number] for number in numbers]
            found |= zip(numbers, store.slices(ranges), strict=True)
        for number, one in enumerate(wanted):
            self._check(one, found[number].tokens)
        return [found[number] for number in range(len(wanted))]

    def _check(self, wanted: Range, tokens: Ints) -> None:
        """Raise DataError if a token is not in the vocabulary."""
        if not len(tokens) or 0 <= tokens.min() <= tokens.max() < self._vocabulary:
            return
        wrong = int(tokens.min()) if tokens.min() < 0 else int(tokens.max())
        place, number = self._corpora[wanted.source].token_file(wanted.block, wanted.document)
        message = f"document {number} has token {wrong}, but the model's vocabulary has {self._vocabulary}"
        hint = f"set model.vocab to {wrong + 1} or more, or choose tokens of the model's tokenizer"
        raise DataError(message, key=place, hint=hint if wrong >= 0 else None)
