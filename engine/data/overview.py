"""Facts about the documents before training, and the blocks that it needs first.

Small sources are packed and counted completely. Of a large source only the first windows are packed, so that the time
of a start does not depend on its size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from engine.config import schema
from engine.config.schema import Config
from engine.config.sources import source_configs
from engine.data.apart import check_cache
from engine.data.bigrams import BigramCounts
from engine.data.block_files import Placed
from engine.data.blocks.blocks import BlockId, Range
from engine.data.blocks.local_blocks import LocalBlocks
from engine.data.blocks.packed import Packed
from engine.data.blocks.texts import Texts
from engine.data.cache import cache_folder, identity_of
from engine.data.corpus import Corpus, TextCorpus, TokenCorpus
from engine.data.opening import list_blocks, open_sources
from engine.data.order import FEW_BYTES, are_few
from engine.data.parts import Tokens, is_packed, pack_blocks
from engine.data.sequences import SequenceTable
from engine.data.sources.notes import notes
from engine.data.steps import AHEAD_STEPS, Cursor, Steps
from engine.data.tokenizers.load import BYTES, check_weights, open_tokenizer
from engine.errors import BytescaleError, ConfigError, DataError

_SECONDS = 5.0  # between two lines of progress
Say = Callable[[str], None]


@dataclass(frozen=True)
class Overview:
    """The documents of all sources of a config."""

    training: int
    validation: int
    empty: int  # left out, because they have no token to predict
    longest: int  # inputs
    bigram_nats: float | None  # bigram entropy (bigrams.py); None unless all tokens are bytes, with BOS and EOS
    dropped: int = 0  # documents, and pieces of documents, that a transform left out


class CommandBlocks(LocalBlocks):
    """The blocks of a command, which packs without loaders."""

    def __init__(self, texts: Mapping[str, Texts]) -> None:
        super().__init__(texts)
        self._asked, self._together = list[BlockId](), 1

    def ask(self, wanted: Iterable[BlockId]) -> None:
        self._asked = [*wanted]

    def pack_and_open(self, block: BlockId) -> Packed:
        """Open a block. One that is missing is packed with all cores, together with the next ones that were asked for.

        They are none, then 1, 3, 7, ..., so that at most twice as many are packed as are needed, and processes are
        started few times. Raises errors of this block alone: others may never be needed.
        """
        if block in self._asked and not self.is_packed(block):
            later = self._asked[self._asked.index(block) :]
            works = [self._work(one) for one in later[: self._together]]
            self._together *= 2
            with suppress(BytescaleError):
                pack_blocks(works[0].tokens, works[0].folder, [one.block for one in works])
        return super().pack_and_open(block)


class Corpora:
    """The sources of a config. Only the places of their blocks have been read."""

    def __init__(self, config: Config) -> None:
        """List the blocks of all sources.

        Raises DataError for a source that cannot be used, or whose tokens another tokenizer made; ConfigError if its
        tokenizer has more tokens than the model, or if `data.cache` is among its documents.
        """
        check_cache(config.data)
        self.data, self.vocabulary, self.batch_tokens = config.data, config.model.vocab, config.batch_tokens
        self._first = set[BlockId]()  # of the steps and the validation set that come first
        self.blocks = list_blocks(config.data)
        self.sources, self._store = open_sources(config.data, self.blocks, make_blocks=CommandBlocks)
        if not all(isinstance(corpus, TokenCorpus) and corpus.facts is None for corpus in self.sources):
            check_weights(config)
        _check_tokenizer(self.sources, config.data)
        _check_vocabulary(self.sources, config)
        self.steps = Steps(self.sources, config)

    @property
    def fingerprints(self) -> dict[str, str]:
        """The fingerprint of each source, by name."""
        return {corpus.name: corpus.fingerprint for corpus in self.sources}

    @property
    def read_lately(self) -> dict[str, str]:
        """What decides the documents of each source that the first versions did not read (rows.py), by name."""
        found = {name: {getattr(one, "read_lately", "") for one in blocks} for name, blocks in self.blocks.items()}
        return {name: ", ".join(sorted(lately - {""})) for name, lately in found.items()}

    @cached_property
    def are_few(self) -> bool:
        """Whether there are so few documents that all are read before training."""
        return are_few(self.sources)

    def first(self, cursor: Cursor) -> set[BlockId]:
        """Return the blocks of texts that the step at `cursor` and the validation set need, about; all if few."""
        if self.are_few:
            texts = (corpus for corpus in self.sources if isinstance(corpus, TextCorpus))
            return {BlockId(corpus.name, block) for corpus in texts for block in range(corpus.blocks)}
        # How much of a present window is left is not known. Most have more than a step takes, so that the next ones are
        # not needed.
        begun = {name: place._replace(document=0, start=0) for name, place in cursor.places.items()}
        upcoming = self.steps.upcoming(replace(cursor, places=begun), self.batch_tokens)
        return {*upcoming, *self.steps.validating(cursor.order)}

    def pack_first(self, cursor: Cursor, say: Say) -> None:
        """Pack the blocks of `first`, with all cores.

        `say` gets lines of progress, and those of `notes` about each source.
        Raises DataError and StorageError as `pack_block` does.
        """
        for name, one in source_configs(self.data).items():
            for line in notes(one, self.blocks.get(name, ()), self.vocabulary):
                say(line)
        first = self.first(cursor)
        self._first = {*first, *self.steps.upcoming(cursor, AHEAD_STEPS * self.batch_tokens)}
        shown = time.monotonic()

        def progress(done: int, total: int) -> None:
            nonlocal shown
            if time.monotonic() - shown > _SECONDS:
                shown = time.monotonic()
                say(f"reading documents of {', '.join(corpus.place for corpus in texts)}: {done / total:.0%}")

        texts = [corpus for corpus in self.sources if isinstance(corpus, TextCorpus)]
        if texts:  # all have the same tokenizer and folder
            of_name = {corpus.name: corpus.texts for corpus in texts}
            blocks = [of_name[name].blocks[block] for name, block in sorted(first)]
            pack_blocks(texts[0].texts.tokens, texts[0].texts.folder, blocks, progress=progress)

    def next(self, cursor: Cursor) -> tuple[SequenceTable, Cursor] | None:
        """Return `Steps.next`. Its blocks are packed with all cores, also those that `first` did not expect."""
        self._store.ask(self.steps.upcoming(cursor, AHEAD_STEPS * self.batch_tokens))
        return self.steps.next(cursor)

    def placed(self) -> Placed:
        """Return the blocks of the first steps that are in the cache of this host, with its identity."""
        texts = {corpus.name: corpus for corpus in self.sources if isinstance(corpus, TextCorpus)}
        if not texts:
            return {}
        packed = [
            block
            for block in sorted(self._first)
            if block.source in texts and is_packed(texts[block.source].texts.part(block.block))
        ]
        return dict.fromkeys(packed, identity_of(cache_folder(self.data)))

    @cached_property
    def tokens(self) -> int | None:
        """Inputs of all training documents, which have been packed; None if they are many."""
        if not self.are_few:
            return None
        total = 0
        for corpus in self.sources:
            for number in range(corpus.blocks):
                lengths = corpus.lengths(number)
                total += int(lengths.inputs()[lengths.hash() / 2.0**64 >= corpus.share].sum())
        return total

    @cached_property
    def overview(self) -> Overview | None:
        """Counts of few documents, which have been packed; None if they are many."""
        if not self.are_few:
            return None
        training = validation = empty = dropped = longest = 0
        bigrams = BigramCounts()
        for corpus in self.sources:
            for number in range(corpus.blocks):
                lengths = corpus.lengths(number)
                inputs, hashes, left_out = lengths.inputs(), lengths.hash(), lengths.left_out
                held = int((hashes[inputs > 0] / 2.0**64 < corpus.share).sum())
                training, validation = training + int((inputs > 0).sum()) - held, validation + held
                empty += int((inputs == 0).sum()) + (len(left_out.empty) if left_out else 0)
                dropped += left_out.dropped if left_out else 0
                longest = max(longest, int(inputs.max(initial=0)))
                if _is_bytes(corpus):
                    for document, (count, content) in enumerate(zip(inputs.tolist(), hashes.tolist(), strict=True)):
                        whole = Range(corpus.name, number, document, 0, count + 1, content)
                        ((ids, _),) = corpus.slices([whole])
                        bigrams.add(ids.astype(np.int32))
        nats = bigrams.entropy() if all(map(_is_bytes, self.sources)) else None
        return Overview(training, validation, empty, longest, nats, dropped)


def tokenizer_facts(data: schema.Data) -> Mapping[str, Any] | None:
    """Return the name of `data.tokenizer`, the ids of its BOS and EOS (None if not added), and its fingerprint.

    None if all sources are token files: other tokenizers may have made them. Raises DataError if it cannot be opened.
    """
    if all(one.format == "tokens" for one in source_configs(data).values()):
        return None
    found = Tokens.of(data).open()
    return {"name": data.tokenizer, "bos": found.bos, "eos": found.eos, "fingerprint": found.fingerprint}


def _check_tokenizer(corpora: Sequence[Corpus], data: schema.Data) -> None:
    """Raise DataError if `data.tokenizer` did not make the tokens of a token file.

    `bytes`, the default, means that the config names no tokenizer. It is accepted, unless texts are encoded with it,
    too. Nothing is known of the token file of another tool.
    """
    if data.tokenizer == BYTES and not any(isinstance(corpus, TextCorpus) for corpus in corpora):
        return
    for corpus in corpora:
        facts = corpus.facts if isinstance(corpus, TokenCorpus) else None
        if facts is None or facts.made_by(data.tokenizer):
            continue
        ours = open_tokenizer(data.tokenizer)
        theirs = f"{facts.tokenizer}, fingerprint {facts.fingerprint[:12]}, vocabulary {facts.vocabulary:,}"
        mine = f"{ours.kind}, fingerprint {ours.fingerprint[:12]}, vocabulary {ours.vocabulary:,}"
        message = f"({mine}) did not make the tokens of {corpus.place}; another tokenizer did ({theirs})"
        hint = "set data.tokenizer to the one that did, or pack the documents again with `bytescale data pack`"
        raise DataError(message, key=f"data.tokenizer={data.tokenizer}", hint=hint)


def _check_vocabulary(corpora: Sequence[Corpus], config: Config) -> None:
    """Raise ConfigError if the documents may have tokens that are not in the model's vocabulary.

    The vocabulary of a token file of another tool is not known; each token is checked when it is read.
    """
    for corpus in corpora:
        size = corpus.vocabulary
        if size is not None and size > config.model.vocab:
            is_packed = isinstance(corpus, TokenCorpus)
            whose = f"the tokenizer of {corpus.place}" if is_packed else f"data.tokenizer={config.data.tokenizer}"
            message = f"is smaller than the vocabulary of {whose}, {size:,}"
            hint = "set model.vocab={}" if config.run.weights is None else "choose run.weights with a vocabulary of {}"
            raise ConfigError(message, key=f"model.vocab={config.model.vocab}", hint=f"{hint.format(size)} or more")


def check_ids(corpora: Sequence[Corpus], vocabulary: int) -> None:
    """Raise DataError if a token file of another tool has a token that is not in the model's vocabulary.

    Of a file above 64 MiB only parts are read; ranks compare every token that they read (`corpus.Reader`).
    """
    for corpus in corpora:
        if isinstance(corpus, TokenCorpus) and corpus.facts is None:
            least, largest = corpus.tokens.extremes(FEW_BYTES)
            wrong = least if least < 0 else largest
            if not 0 <= wrong < vocabulary:
                message = f"its tokens go from {least} to {largest}, but the model's vocabulary has {vocabulary}"
                hint = f"set model.vocab to {largest + 1} or more, or choose tokens of the model's tokenizer"
                raise DataError(message, key=f"{corpus.place}.bin", hint=hint if least >= 0 else None)


def _is_bytes(corpus: Corpus) -> bool:
    """Return whether the tokens of a corpus are bytes, with EOS, which separates documents."""
    return corpus.kind == BYTES and corpus.ends[1] is not None
