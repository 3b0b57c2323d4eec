"""The faults of one document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.data.lint.text_checks import RUN, longest_run_of_ids, suspicious
from engine.data.sources.chat import ROLES
from engine.data.sources.source import Document, Message
from engine.data.tokenizers.tokenizer import Tokenizer
from engine.data.transforms.transforms import transformed
from engine.units import Ints


class Limits(NamedTuple):
    """What training takes, in tokens."""

    context: int
    batch_tokens: int
    vocabulary: int


class Trained(NamedTuple):
    """A document that training gets: one of a file, or what transforms made of one."""

    document: Document
    ids: Ints  # [n] with BOS and EOS, none for an empty text
    mask: NDArray[np.bool_] | None  # [n] which count; None: all


def trained_on(
    document: Document, steps: str, tokenizer: Tokenizer | None
) -> tuple[list[Trained], int, Mapping[str, int]]:
    """Apply the `transform` of a block to a document.

    Returns what training gets of it, how many pieces were left out, and how many pieces each step has changed, by name.
    Raises DataError as `transformed` does, but not for ids that the tokenizer does not have: they stay as they are.
    """
    if document.problem is not None:
        raise document.problem
    ids = document.ids
    if ids is not None and (tokenizer is None or not len(ids) or ids.max() >= tokenizer.vocabulary):
        return [Trained(document, ids, document.mask)], 0, {}
    assert tokenizer is not None
    pieces, dropped, changed = transformed(document, steps, tokenizer)
    encoded = ((piece.document, *piece.encoded) for piece in pieces)
    return [Trained(one, ids.astype(np.int64, copy=False), mask) for one, ids, mask in encoded], dropped, changed


def faults(found: Trained, tokenizer: Tokenizer | None, limits: Limits) -> Iterator[tuple[str, str]]:
    """Yield (code, detail) of each fault of a document."""
    document, ids, mask = found
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
