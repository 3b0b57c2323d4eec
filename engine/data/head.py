"""The first tokens of a step's sequences as text, with a mark on those that count in the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.config.schema import Config
from engine.config.sources import source_configs
from engine.data.blocks.blocks import Range
from engine.data.corpus import Corpus, TextCorpus, TokenCorpus, chosen_lengths
from engine.data.history import History
from engine.data.parts import Tokens
from engine.data.places import Known, Place, places_of
from engine.data.sequences import SequenceTable
from engine.data.steps import Cursor, Steps
from engine.data.tokenizers.tokenizer import Ids, Tokenizer
from engine.errors import DataError
from engine.run.checkpoints import newest_first, read_state

Progress = Callable[[int, int], None]  # gets the steps that are known, and the wanted one


class Piece(NamedTuple):
    """Some text whose tokens all count in the loss, or none of them does."""

    text: str
    counted: bool


@dataclass(frozen=True)
class Shown:
    """The beginning of a sequence. Of a document that is not found, or has changed since the step, nothing is shown."""

    document: Known
    place: Place
    start: int  # first input in the document
    length: int  # inputs of the sequence
    inputs: int | None  # of the document; None if it is not the one of the step
    loss_tokens: int  # of the sequence
    ids: list[int]  # the first tokens
    counted: list[bool]  # which of them are labels that count in the loss; the first one is not a label
    text: list[Piece]

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        values = asdict(self) | {"text": [piece._asdict() for piece in self.text]}
        del values["document"], values["place"]
        return self.document.to_json() | self.place._asdict() | values


def step_of_run(history: History, step: int, progress: Progress) -> SequenceTable:
    """Return the sequences of a step of a run: from the ledger if it is finished, else computed.

    Raises DataError if the step is no longer in the ledger, or if the run ends before.
    """
    corpora, sources = history.corpora, history.ledger.sources
    if step > history.finished:
        saved = (read_state(folder) for folder in newest_first(history.folder.checkpoints))
        state = next((one for one in saved if one.step < step), None)
        cursor = Cursor() if state is None else Cursor.of_json(state.cursor)
        return step_after(Steps(corpora, history.config), cursor, step, progress)
    rows = history.rows(step)
    names = [corpus.name for corpus in corpora]
    gone = sorted({sources[number] for number in set(rows["source"].tolist())} - {*names})
    if gone:
        message = f"step {step} has documents of {', '.join(gone)}, which the config of the run no longer has"
        raise DataError(message, key=str(history.folder.resolved), hint="`bytescale data trace` lists the documents")
    numbers = np.array([names.index(name) if name in names else -1 for name in sources], dtype=np.int64)
    block, document, start, length, loss_tokens = (
        rows[name].astype(np.int64) for name in ("block", "document", "start", "length", "loss_tokens")
    )
    return SequenceTable(numbers[rows["source"]], block, document, start, length, loss_tokens, rows["hash"])


def step_after(steps: Steps, cursor: Cursor, step: int, progress: Progress) -> SequenceTable:
    """Return the sequences of a step, not before the one at a cursor. Raises DataError if the run ends before.

    The steps between are computed, so their documents are packed.
    """
    while (found := steps.next(cursor)) is not None:
        table, cursor = found
        if cursor.step == step:
            return table
        progress(cursor.step, step)
    message = f"the run ends after step {cursor.step}: {steps.ended(cursor)}"
    raise DataError(message, key="--step", hint=f"choose a step up to {cursor.step}")


def first_tokens(corpora: Sequence[Corpus], config: Config, table: SequenceTable, tokens: int) -> list[Shown]:
    """Return the first `tokens` tokens of each sequence of a table."""
    known = [
        Known(corpora[source].name, block, document, content)
        for source, block, document, content in zip(
            table.source.tolist(), table.block.tolist(), table.document.tolist(), table.hash.tolist(), strict=True
        )
    ]
    places, found = places_of(corpora, known), list[Shown]()
    for sequence, document in enumerate(known):
        corpus, place = corpora[int(table.source[sequence])], places[document]
        start, length, loss_tokens = (int(one[sequence]) for one in (table.start, table.length, table.loss_tokens))
        if place.problem is not None:
            found.append(Shown(document, place, start, length, None, loss_tokens, [], [], []))
            continue
        one = np.array([document.document]), np.array([document.hash], dtype=np.uint64)
        lengths = chosen_lengths(corpus, document.block, *one)
        stop = start + min(tokens, length + 1)  # the last token is only a label
        named = document.source, document.block, document.document
        ((ids, mask),) = corpus.slices([Range(*named, start, stop, document.hash)])
        counted = np.ones(len(ids), dtype=np.bool_) if mask is None else mask.copy()
        counted[:1] = False
        text = decode(_tokenizer(corpus, config), ids, counted)
        inputs = int(lengths.inputs()[document.document])
        found.append(Shown(document, place, start, length, inputs, loss_tokens, ids.tolist(), counted.tolist(), text))
    return found


def _tokenizer(corpus: Corpus, config: Config) -> Tokenizer | None:
    """Return the tokenizer of a corpus; None if it is not known, because another tool made the token file."""
    if isinstance(corpus, TextCorpus):
        return corpus.texts.tokens.open()
    tokenizer = Tokens.of(source_configs(config.data)[corpus.name]).open()
    facts = corpus.facts if isinstance(corpus, TokenCorpus) else None
    if facts is None:  # `bytes` is the default, of a config that names no tokenizer
        return None if tokenizer.kind == "bytes" else tokenizer
    return tokenizer if tokenizer.fingerprint == facts.fingerprint else None


def decode(tokenizer: Tokenizer | None, ids: NDArray[np.integer], counted: NDArray[np.bool_]) -> list[Piece]:
    """Return the text of ids [n] in pieces. BOS and EOS are visible, and ids that the tokenizer does not have.

    Without a tokenizer, the text is the ids themselves.
    """
    if tokenizer is None:
        marked = {token: f"{token} " for token in ids.tolist()}
    else:
        marked = {token: f"<id {token}>" for token in ids.tolist() if token >= tokenizer.vocabulary}
        for name, token in (("<BOS>", tokenizer.bos), ("<EOS>", tokenizer.eos)):
            if token is not None:
                marked[token] = tokenizer.decode([token]) or name
    tokens: Ids = ids.astype(np.int32)
    special = np.isin(tokens, [*marked])
    ends = (np.diff(counted) | special[1:] | special[:-1]).nonzero()[0] + 1
    found, first = list[Piece](), 0  # `first` token after the last special one
    for start, stop in pairwise([0, *ends.tolist(), len(ids)]) if len(ids) else ():
        if special[start]:
            text, first = marked[int(ids[start])], stop
        else:
            assert tokenizer is not None
            # Together with the tokens before, because libraries remove a space before the first token.
            before = tokenizer.decode(tokens[first:start]) if start > first else ""
            text = tokenizer.decode(tokens[first:stop])
            text = text.removeprefix(before) if text.startswith(before) else tokenizer.decode(tokens[start:stop])
        if found and found[-1].counted == counted[start]:
            found[-1] = Piece(found[-1].text + text, found[-1].counted)
        else:
            found.append(Piece(text, bool(counted[start])))
    return found
