"""What all tokenizers offer, and what decides the ids of a document.

Special tokens enter a document as its first and last id, or from a chat template, alone. Text that reads like one, such
as "<s>", is never encoded as the special token: it is ordinary text, or the document is rejected if the library cannot
treat it so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.errors import DataError

Ids = NDArray[np.int32]
MOST_TOKENS = 1 << 24  # of a vocabulary; the largest known has 262,144
Kind = Literal["bytes", "huggingface", "sentencepiece", "tiktoken", "tekken"]


class Codec(Protocol):
    """The tokenizer of a library, without special tokens."""

    def encode(self, text: str | bytes) -> Ids:
        """Return the ids of a text, [n]. Raises DataError if the text cannot be encoded; see `Tokenizer.encode`."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""


class ChatEncoder(Protocol):
    """A chat template and the tokenizer that it belongs to."""

    def encode(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, trained: Sequence[bool] | None
    ) -> tuple[Ids, NDArray[np.bool_]]:
        """Return the ids of a chat and its mask; see `Tokenizer.chat`."""

    @property
    def end_of_turn(self) -> int | None:
        """The special token with which the template ends the assistant's messages; None if it uses none."""

    @property
    def content(self) -> bytes:
        """The properties that determine the ids, besides the codec."""


@dataclass(frozen=True)
class Loaded:
    """A tokenizer as its files describe it: its special ids (None if unknown), and whether texts start with BOS."""

    codec: Codec
    vocabulary: int
    bos: int | None
    eos: int | None
    adds_bos: bool
    chats: ChatEncoder | None = None  # None without a chat template


@dataclass(frozen=True)
class Tokenizer:
    """Turns documents into ids.

    `bos` and `eos` are the ids that `document` adds, or None. `vocabulary` is the largest id plus one, special tokens
    included. Tokenizers with equal fingerprints give equal documents.
    """

    kind: Kind
    codec: Codec
    vocabulary: int
    bos: int | None
    eos: int | None
    fingerprint: str
    chats: ChatEncoder | None = None  # None without a chat template

    def encode(self, text: str | bytes) -> Ids:
        """Return the ids of a text without BOS and EOS, [n].

        Raises DataError, without the document's name, if the text is not UTF-8 (bytes alone accept anything), if the
        library would encode a part of it as a special token, or if it panics.
        """
        with _panics():
            return self.codec.encode(text)

    def document(self, text: str | bytes) -> Ids:
        """Return the ids of a document, [n]: BOS (if any), its text, EOS (if any). Raises the errors of `encode`."""
        ids = self.encode(text)
        start = self.bos is not None
        document = np.empty(start + len(ids) + (self.eos is not None), dtype=np.int32)
        document[start : start + len(ids)] = ids
        if self.bos is not None:
            document[0] = self.bos
        if self.eos is not None:
            document[-1] = self.eos
        return document

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        trained: Sequence[bool] | None = None,
    ) -> tuple[Ids, NDArray[np.bool_]]:
        """Return the ids of a chat, int32 [n], and which of them count as labels, bool [n].

        The tokenizer's chat template makes one text of the messages, dicts with `role`, `content` and what else the
        template uses, and of the tools that the assistant may call. BOS and EOS are those of the template alone. Only
        the assistant's messages that are `trained` count, including the tokens that end their turns. Raises DataError,
        without the document's name, if the tokenizer has no template, or the chat cannot be encoded with it; see
        `template.render`.
        """
        if self.chats is None:
            hint = "set data.tokenizer to a Hugging Face folder with tokenizer.json and a chat template"
            raise DataError(f"is a chat, but the tokenizer ({self.kind}) has no chat template", hint=hint)
        with _panics():
            return self.chats.encode(messages, tools, trained)

    @property
    def end_of_turn(self) -> int | None:
        """The special token with which the chat template ends the assistant's messages; None if it uses none."""
        return None if self.chats is None else self.chats.end_of_turn

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """Return ids as text for display. Special tokens appear by name or not at all, invalid UTF-8 as U+FFFD."""
        return self.codec.decode(np.asarray(ids).tolist())


def make(kind: Kind, loaded: Loaded, content: bytes, place: str, bos: bool | None, eos: bool | None) -> Tokenizer:
    """Create a tokenizer from its loaded files, their content, and whether documents start with BOS and end with EOS.

    None adds BOS where the files add it, and EOS wherever it is known, because it separates documents. Raises DataError
    for True without such a token.
    """
    first = _chosen("bos", bos, loaded.bos, loaded.adds_bos, place)
    last = _chosen("eos", eos, loaded.eos, True, place)
    hashed = blake2b(f"{kind} {first} {last} ".encode(), digest_size=16)
    hashed.update(content)
    if loaded.chats is not None:
        hashed.update(loaded.chats.content)
    return Tokenizer(kind, loaded.codec, loaded.vocabulary, first, last, hashed.hexdigest(), loaded.chats)


def _chosen(name: str, wish: bool | None, token: int | None, adds: bool, place: str) -> int | None:
    if wish and token is None:
        beside = f"for a tokenizer.json, a tokenizer_config.json next to it can name a {name}_token"
        raise DataError(f"has no {name.upper()} token", key=place, hint=f"set data.{name} to null or false; {beside}")
    return token if wish or (wish is None and adds) else None


def as_text(text: str | bytes) -> str:
    """Return a text as str. Raises DataError if it is not UTF-8: the libraries would replace invalid bytes, or fail."""
    try:
        if isinstance(text, bytes):
            return text.decode("utf-8")
        text.encode("utf-8")  # rejects unpaired surrogates
        return text
    except UnicodeError as error:
        unit = "byte" if isinstance(error, UnicodeDecodeError) else "character"
        start = getattr(error, "start", 0)
        raise DataError(f"is not UTF-8 at {unit} {start}", hint="the byte tokenizer accepts any file") from error


@contextmanager
def _panics() -> Iterator[None]:
    """Turn a panic of a Rust library, which is not an Exception, into a DataError.

    Libraries panic if a regular expression of the tokenizer's file backtracks too often.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        hint = "leave the document out, or correct the regular expressions of the tokenizer's file"
        raise DataError(f"cannot be encoded by the tokenizer's library: {str(error)[:200]}", hint=hint) from error


@contextmanager
def needs(package: str, path: Path) -> Iterator[None]:
    """Turn the ImportError of an optional package into a DataError that says how to install it."""
    try:
        yield
    except ImportError as error:
        message = f"cannot be read without the package {package} ({error})"
        raise DataError(message, key=str(path), hint=f"pip install {package}") from error
