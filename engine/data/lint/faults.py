"""The faults of one document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.data.encode import encode
from engine.data.lint.text_checks import RUN, longest_run_of_ids, suspicious
from engine.data.sources.chat import ROLES
from engine.data.sources.source import Document, Message
from engine.data.tokenizers.tokenizer import Tokenizer
from engine.units import Ints


class Limits(NamedTuple):
    """What training takes, in tokens."""

    context: int
    batch_tokens: int
    vocabulary: int


def ids_of(document: Document, tokenizer: Tokenizer | None) -> tuple[Ints, NDArray[np.bool_] | None]:
    """Return the ids of a document with BOS and EOS, [n], none for an empty text, and which count; None: all.

    Raises DataError as `encode` does, but not for ids that the tokenizer does not have.
    """
    if document.ids is not None:
        return document.ids, document.mask
    assert tokenizer is not None
    ids, mask = encode(document, tokenizer)
    return ids.astype(np.int64, copy=False), mask


def faults(
    document: Document, ids: Ints, mask: NDArray[np.bool_] | None, tokenizer: Tokenizer | None, limits: Limits
) -> Iterator[tuple[str, str]]:
    """Yield (code, detail) of each fault of a document with `ids` [n]; those in `mask` count in the loss."""
    bos, eos = (None, None) if tokenizer is None else (tokenizer.bos, tokenizer.eos)
    start = int(bos is not None and ids[:1].tolist() == [bos])
    count = len(ids) - start - int(eos is not None and ids[start:][-1:].tolist() == [eos])
    if not len(ids):
        yield "L06", "is empty"
        return
    if count < 2:
        yield "L07", f"has only the token {ids[start]}" if count else "has only BOS and EOS"
    least, most = int(ids.min()), int(ids.max())
    if least < 0 or (tokenizer is not None and most >= tokenizer.vocabulary):
        size = "" if tokenizer is None else f"; {tokenizer.kind} has a vocabulary of {tokenizer.vocabulary:,}"
        yield "L04", f"has token {least if least < 0 else most}{size}"
    elif most >= limits.vocabulary:
        yield "L05", f"has token {most}; model.vocab is {limits.vocabulary}"
    if mask is not None and len(ids) > 1 and not mask[1:].any():  # the first id is not a label
        yield "L08", "has no token that counts after the first one"
    if document.messages is not None:
        yield from _faults_of_chat(document.messages)
    elif document.text is None:
        run, at = longest_run_of_ids(ids)
        if run >= RUN:
            yield "L13", f"repeats the id {ids[at]} {run:,} times from id {at} on"
    else:
        with suppress(UnicodeDecodeError):  # data.encoding=bytes: what other bytes mean is not known
            yield from suspicious(document.text.decode("utf-8"))
    if len(ids) - 1 > limits.context:
        yield "L15", f"has {len(ids) - 1:,} tokens; context is {limits.context:,}"
    if len(ids) - 1 > limits.batch_tokens:
        yield "L16", f"has {len(ids) - 1:,} tokens; batch_tokens is {limits.batch_tokens:,}"


def _faults_of_chat(messages: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """Yield (code, detail) of the first fault of each kind in the messages."""
    found = dict[str, str]()
    for number, message in enumerate(messages):
        role, content = message["role"], message.get("content", "")
        if role not in ROLES:
            found.setdefault("L18", f"messages[{number}] has the role {role!r}")
        # Empty system prompts and results of tools are usual.
        if role in ("user", "assistant") and not content.strip() and "tool_calls" not in message:
            found.setdefault("L17", f"messages[{number}], of the {role}, is empty")
        for code, detail in suspicious(content):
            found.setdefault(code, f"messages[{number}] {detail}")
    yield from found.items()
