"""The kinds of faults, and the findings of each kind."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from engine.data.lint.text_checks import RUN
from engine.data.profile import histogram
from engine.errors import DataError

_VARIABLE = re.compile(r"\b((?:byte|column|character|has|contains|id|token) |messages\[:?)-?[\d,]+")


class Check(NamedTuple):
    """A kind of fault."""

    refused: bool  # by training
    what: str
    advice: str


CHECKS: Mapping[str, Check] = {
    "L01": Check(True, "files that cannot be read to their end", "download or write the file again"),
    "L02": Check(True, "documents that cannot be used", "fix or remove them"),
    "L03": Check(True, "texts that are not valid UTF-8", "convert them to UTF-8, or remove them"),
    "L04": Check(True, "ids that the tokenizer does not have", "set data.tokenizer to the one that made the ids"),
    "L05": Check(True, "tokens beyond model.vocab", "set model.vocab to the tokenizer's vocabulary"),
    "L06": Check(False, "empty documents", "nothing, unless they should have text: they are left out"),
    "L07": Check(False, "documents of at most one token, BOS and EOS aside", "remove them: there is nothing to learn"),
    "L08": Check(
        False, "documents of which no token counts in the loss", "correct their masks or flags, or remove them"
    ),
    "L09": Check(False, "many replacement characters, U+FFFD", "convert the original texts again"),
    "L10": Check(False, "UTF-8 that was read in another encoding", "convert it back: text.encode('cp1252').decode()"),
    "L11": Check(False, "NUL characters", "remove them, or the documents if these are binary"),
    "L12": Check(False, "byte order marks, U+FEFF", "remove them: they are trained on"),
    "L13": Check(False, f"a character or an id {RUN:,} times in a row", "cut the run, or remove the documents"),
    "L14": Check(False, "copies of other documents", "remove them, unless they should count more than once"),
    "L15": Check(False, "documents longer than context", "raise context, unless they may be split into pieces"),
    "L16": Check(False, "documents longer than batch_tokens", "raise batch_tokens, or shorten them: each is a step"),
    "L17": Check(False, "chats with an empty message", "remove it, or the chat: an empty answer is trained on"),
    "L18": Check(False, "chats with an unknown role", "write user or assistant, unless the template knows it"),
}


class Example(NamedTuple):
    """A document with a fault. `number` is its own in its block."""

    number: int
    place: str
    detail: str


@dataclass
class Finding:
    """Documents with one kind of fault, for one reason if there are several, with a few examples."""

    code: str
    reason: str
    hint: str
    count: int = 0
    examples: list[Example] = field(default_factory=list)


@dataclass
class Tally:
    """The findings in some blocks. The first `keep` documents of each kind of fault are examples."""

    keep: int
    documents: int = 0
    tokens: int = 0  # with BOS and EOS, of what transforms leave
    refused: int = 0  # documents and files with a fault that training rejects
    # Inputs of the documents that training takes, after transforms
    lengths: Counter[int] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)  # documents to which each transform did something
    dropped: int = 0  # pieces of documents that transforms left out
    findings: dict[tuple[str, str], Finding] = field(default_factory=dict)

    def add(self, code: str, example: Example, problem: DataError | None = None) -> None:
        """Count a fault, with the error that reading the document raised."""
        hint = problem.problems[0].hint if problem is not None else None
        reason = _VARIABLE.sub(r"\1N", example.detail) if code == "L02" else ""
        self._count(Finding(code, reason, hint or CHECKS[code].advice, 1, [example]))

    def merge(self, other: Tally) -> None:
        """Add the findings in later blocks."""
        self.documents += other.documents
        self.tokens += other.tokens
        self.refused += other.refused
        self.lengths.update(other.lengths)
        self.changed.update(other.changed)
        self.dropped += other.dropped
        for finding in other.findings.values():
            self._count(finding)

    def _count(self, found: Finding) -> None:
        known = self.findings.setdefault((found.code, found.reason), Finding(found.code, found.reason, found.hint))
        known.count += found.count
        known.examples += found.examples[: max(0, self.keep - len(known.examples))]

    def lengths_found(self) -> dict[str, Any] | None:
        """Return the histogram of lengths; None if there is no document to train on."""
        sizes = np.array(sorted(self.lengths), dtype=np.int64)
        return histogram(sizes, np.array([self.lengths[size] for size in sizes.tolist()])) if len(sizes) else None
