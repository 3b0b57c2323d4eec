"""The documents of a source, in blocks of tokens: those of a token file, or of texts that are packed when needed.

A document of t tokens has t - 1 inputs: its last token is only a label. With BOS and EOS, a text of n tokens has n + 1
inputs. Letters: B blocks of a source, D documents of a block.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.config import schema
from engine.config.schema import Config
from engine.config.sources import source_configs
from engine.data.block_files import read_blocks
from engine.data.cache import ENDINGS, cache_folder
from engine.data.mixture import segments_of
from engine.data.parts import OTHERS, LeftOut, Tokens, is_packed, pack_block, part_path, read_left_out
from engine.data.sources.formats import FORMATS
from engine.data.sources.source import Block
from engine.data.sources.urls import is_url
from engine.data.token_facts import blocks_path, hashes_path, parts_path, read_facts
from engine.data.token_file import Numbers, TokenFile
from engine.errors import DataError, StorageError
from engine.run.folder import RunFolder
from engine.units import Ints

_HASH_BYTES = 16
_BLOCK = 256  # documents of a block of another tool's token file
_ENDS = 1 << 16  # bytes at the end of a file of another tool that its fingerprint covers
_OPENED = 128  # blocks of texts that a process keeps open
_ATTEMPTS = 5  # to open a block that other runs remove


@dataclass(frozen=True, eq=False)
class Packed:
    """The documents of a block: documents first .. last - 1 of a token file."""

    tokens: TokenFile
    hashes: Numbers | None  # of the contents of all documents of the file, 8 bytes each; None for one of another tool
    first: int
    last: int
    left_out: LeftOut | None = None  # None for a file of another tool, and one of `bytescale data pack`

    def __post_init__(self) -> None:
        """Raise DataError if the mask of a block of texts is missing."""
        if self.left_out is not None:
            self.tokens.check_mask(self.left_out.masked)

    def inputs(self) -> Ints:
        """Return how many inputs each document has, int64 [D]. Those without an input have fewer than two tokens."""
        found: Ints = np.maximum(self.tokens.lengths(self.first, self.last) - 1, 0)
        return found

    def hash(self, first: int = 0, last: int | None = None) -> NDArray[np.uint64]:
        """Return a hash of the content with the mask of documents first .. last - 1 of the block, uint64; of all [D].

        It decides which documents are for validation, so that no content is on both sides. In a file of another tool,
        it is a hash of the document's number.
        """
        begin, count = self.first + first, (self.last - self.first if last is None else last) - first
        if self.hashes is not None:
            found = self.hashes.read("<u8", count, 8 * begin)
            if len(found) < count:
                raise DataError("was cut off", key=str(self.hashes.path), hint="remove it; it is written again")
            return found
        generator = np.random.Philox(key=0).advance(begin // 4)  # draws four numbers at a time
        return generator.random_raw(count + 4)[begin % 4 :][:count]

    def read(self, document: int, start: int, stop: int) -> Ints:
        """Return tokens start .. stop - 1 of a document of the block: int64, fewer if it is shorter."""
        return self.tokens.read(self.first + document, start, stop)

    def counted(self, document: int, start: int, stop: int) -> NDArray[np.bool_] | None:
        """Return which of tokens start .. stop - 1 of a document count as labels; None if all of the block do."""
        return self.tokens.counted(self.first + document, start, stop)


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

    def open(self, block: int) -> Packed:
        """Return the documents of a block. Raises DataError and StorageError if they cannot be read or packed."""
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

    def _bounds(self, block: int) -> tuple[int, int]:
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
        return int(self.tokens.lengths(*self._bounds(block)).sum()) * self.tokens.dtype.itemsize

    def open(self, block: int) -> Packed:
        return Packed(self.tokens, self._hashes, *self._bounds(block))

    def files(self, block: int) -> list[str]:
        return [f"{self.place}.bin"]


class TextCorpus:
    """Documents of which each block is packed into a small token file in a cache folder when it is first needed.

    `wait` is called with the prefix of the token file of a block that is not there, before the block is packed here.
    `opened` is called with the number of a block that has been opened, and what it does not contain.
    """

    def __init__(
        self, name: str, data: schema.Data, share: float, blocks: Sequence[Block], tokenizer: str | None = None
    ) -> None:
        """Take the blocks of a source, and the fingerprint of its tokenizer, if it is known.

        The tokenizer is opened when it is needed; then DataError is raised if it cannot be used.
        """
        self.name, self.place, self.share, self.block_list = name, data.path_text, share, blocks
        self.tokens, self.folder = Tokens.of(data, tokenizer), cache_folder(data)
        self.blocks = len(blocks)
        self.wait: Callable[[Path], None] = lambda part: None
        self.opened: Callable[[int, LeftOut], None] = lambda block, left_out: None

    @property
    def vocabulary(self) -> int | None:
        return self.tokens.open().vocabulary

    @property
    def kind(self) -> str:
        return self.tokens.open().kind

    @property
    def ends(self) -> tuple[int | None, int | None]:
        tokenizer = self.tokens.open()
        return tokenizer.bos, tokenizer.eos

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the names and sizes of all files, how they are read, and their tokenizer."""
        found = blake2b(self.tokens.fingerprint.encode(), digest_size=_HASH_BYTES)
        folders = {posixpath.dirname(path) for block in self.block_list for path in _absolute(block)}
        # Files may have been moved when a run is resumed, so the folder that has them all does not count.
        begin = 0 if not folders or any(map(is_url, folders)) else len(posixpath.commonpath(folders))
        for block in self.block_list:
            how = {key: value for key, value in vars(block).items() if key not in ("path", "root")}
            for key, unset in (("separator", None), ("read_lately", "")):
                if how.get(key) == unset:  # blocks of versions that knew neither had no such field
                    how.pop(key, None)
            names = [path[begin:] for path in _absolute(block)]
            found.update(repr((how, names, block.size)).encode("utf-8", "surrogateescape"))
        return found.hexdigest()

    def size(self, block: int) -> int:
        return self.block_list[block].size

    def open(self, block: int) -> Packed:
        return _opened(self, block)

    def files(self, block: int) -> list[str]:
        return self.block_list[block].files

    def pack_and_open(self, block: int) -> Packed:
        """Open a block, which is packed first if it is not yet."""
        part = part_path(self.tokens, self.folder, self.block_list[block])
        for attempt in range(1, _ATTEMPTS + 1):
            if not is_packed(part):
                self.wait(part)
                pack_block(self.tokens, self.folder, self.block_list[block])
            try:
                tokens, left_out = TokenFile.open(part), read_left_out(part)
                packed = Packed(tokens, Numbers(hashes_path(part)), 0, len(tokens), left_out)
            except DataError as error:
                if isinstance(error.__cause__, PermissionError):
                    raise StorageError("cannot be read: Permission denied", key=str(part), hint=OTHERS) from error
                if attempt == _ATTEMPTS and is_packed(part):
                    raise
                continue  # another run removes it (loaders.trim) just now, or has removed it and packed it again
            if is_packed(part):  # so no file was removed before it was opened
                break
        else:
            message = f"was removed {_ATTEMPTS} times by other runs before it could be read"
            raise StorageError(message, key=str(part), hint="let runs with another data.spool use another data.cache")
        for ending in ENDINGS:  # all of them: programs that tidy up a disk go by the age of each file
            with suppress(OSError):  # there is no mask, or this user cannot write to the folder
                os.utime(f"{part}{ending}")
        self.opened(block, left_out)
        return packed


@lru_cache(_OPENED)  # of all sources together: each has up to four open files
def _opened(corpus: TextCorpus, block: int) -> Packed:
    return corpus.pack_and_open(block)


def _absolute(block: Block) -> list[str]:
    """Return the paths of a block's files in one way of writing; URLs as they are."""
    return [path if path.startswith("/") or is_url(path) else str(Path(path).absolute()) for path in block.files]


def list_blocks(data: schema.Data) -> dict[str, Sequence[Block]]:
    """List the blocks of all sources of texts. Raises DataError for a source without documents."""
    sources = source_configs(data)
    return {name: FORMATS[one.format].blocks(one) for name, one in sources.items() if one.format != "tokens"}


def validation_shares(data: schema.Data) -> dict[str, float]:
    """Return which share of the documents of each source is for validation: all, if `data.mix` gives it no weight."""
    trained = {name for segment in segments_of(data) for name, weight in segment.weights.items() if weight}
    return {name: data.validation_share if name in trained else 1.0 for name in source_configs(data)}


def open_corpora(
    data: schema.Data, blocks: Mapping[str, Sequence[Block]], tokenizer: str | None = None
) -> list[Corpus]:
    """Open all sources of a config. `blocks` are those that `list_blocks` returned.

    `tokenizer` is the fingerprint of the tokenizer of texts, if it is known. Raises DataError for a source that cannot
    be used.
    """
    shares = validation_shares(data)
    corpora = list[Corpus]()
    for name, one in source_configs(data).items():
        share = shares[name]
        if one.format == "tokens":
            corpora.append(TokenCorpus(name, Path(one.paths[0]), share))
        else:
            corpora.append(TextCorpus(name, one, share, blocks[name], tokenizer))
    return corpora


def corpora_of(folder: RunFolder, config: Config) -> list[Corpus]:
    """Open the sources of a run, of which the launcher has listed the blocks.

    Raises DataError as `read_blocks` and `open_corpora`.
    """
    return open_corpora(config.data, *read_blocks(folder.blocks))


def open_chosen(corpus: Corpus, block: int, document: int, content: int) -> Packed:
    """Return the documents of the block of a document whose hash was `content` when it was chosen for a step.

    The process that chooses documents and those that read them open a block at different times, and a file may have
    changed meanwhile: then a document of this number is another one. Raises DataError in this case.
    """
    if block < corpus.blocks:
        packed = corpus.open(block)
        if document < packed.last - packed.first and packed.hash(document, document + 1)[0] == content:
            return packed
    files = corpus.files(block) if block < corpus.blocks else [corpus.place]
    place = files[0] if len(files) == 1 else f"{files[0]} .. {files[-1]}"
    message = f"has changed since document {corpus.name}:{block}:{document} was chosen for a step"
    raise DataError(message, key=place, hint="run the same command again; do not change documents during a run")


@dataclass(frozen=True)
class Reader:
    """Reads tokens for a model whose vocabulary has `vocabulary` tokens."""

    corpora: Sequence[Corpus]
    vocabulary: int

    def tokens(self, source: int, block: int, document: int, start: int, stop: int, content: int | None = None) -> Ints:
        """Read tokens start .. stop - 1 of a document: int64 [stop - start].

        Raises DataError for a token that is not in the vocabulary, and if the document's hash is no longer `content`.
        """
        corpus = self.corpora[source]
        opened = corpus.open(block) if content is None else open_chosen(corpus, block, document, content)
        found = opened.read(document, start, stop)
        if len(found) and not 0 <= found.min() <= found.max() < self.vocabulary:
            wrong = int(found.min()) if found.min() < 0 else int(found.max())
            number = opened.first + document
            message = f"document {number} has token {wrong}, but the model's vocabulary has {self.vocabulary}"
            hint = f"set model.vocab to {wrong + 1} or more, or choose tokens of the model's tokenizer"
            place = f"{opened.tokens.prefix}.bin"
            raise DataError(message, key=place, hint=hint if wrong >= 0 else None)
        return found

    def counted(self, source: int, block: int, document: int, start: int, stop: int) -> NDArray[np.bool_] | None:
        """Return which of tokens start .. stop - 1 of a document count as labels, [stop - start]; None: all."""
        return self.corpora[source].open(block).counted(document, start, stop)
