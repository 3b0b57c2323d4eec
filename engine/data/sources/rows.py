"""The document in a row of JSONL, Parquet or Arrow files, and the table of known shapes of rows.

`data.field` names the field with a text, token ids or a chat, or a shape of several fields: one of the table, or
PROMPT+ANSWER, two fields of any names. Without it, it is the field `text`; if the first row has none, the one known
shape that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from engine.config.explain.spelling import nearest
from engine.data.sources.chat import CONVERSATIONS, FLAGS, MESSAGES, SPEAKERS, TOOLS, chat_document, is_chat
from engine.data.sources.source import Block, Document
from engine.data.sources.token_ids import LOSS_MASK, MASKS, token_document
from engine.errors import DataError

TEXT = "text"  # data.field, unless it is set
_CHOSEN, _REJECTED, _PROMPT, _SYSTEM = "chosen", "rejected", "prompt", "system"
_OF_ALPACA = ("input", _SYSTEM, "history")


class Shape(NamedTuple):
    """A known shape of rows."""

    what: str  # for messages
    fields: tuple[str, ...]  # that every row has
    beside: tuple[str, ...] = ()  # of a shape of several fields: others that it may have
    read: Callable[[Mapping[str, Any], str], Document] | None = None  # of the same: row and place -> document
    lists: bool = False  # whether the field must be a list: a string is a text


def alpaca(row: Mapping[str, Any], place: str) -> Document:
    """Make a chat of a row of Alpaca: `instruction` and `input` are the user's, `output` the assistant's.

    `history` has earlier pairs of both. Raises DataError if they are not texts.
    """
    history = row.get("history") or []
    pairs = isinstance(history, list) and all(isinstance(one, list) and len(one) == 2 for one in history)
    texts = [text_of(row, name, place) for name in ("system", "instruction", "input", "output")]
    if not pairs or not all(isinstance(one, str) for pair in history for one in pair):
        raise DataError("'history' is not a list of pairs of texts", key=place, hint='write [["...", "..."]]')
    system, instruction, more, output = texts
    asked = "\n".join(filter(None, (instruction, more)))
    turns = [turn for question, answer in history for turn in (("user", question), ("assistant", answer))]
    chat = [{"role": role, "content": text} for role, text in (*turns, ("user", asked), ("assistant", output))]
    return chat_document(place, chat, None, "alpaca", system=system)


def answered(row: Mapping[str, Any], prompt: str, answer: str, place: str) -> Document:
    """Make a document of the fields `prompt` and `answer` of a row. Only the answer counts in the loss.

    Texts are joined; a list of messages makes a chat. Raises DataError if they are neither.
    """
    if not any(isinstance(row.get(name), list) for name in (prompt, answer)):
        before, text = (text_of(row, name, place) for name in (prompt, answer))
        return Document(place, _utf8(before + text, place), prompt=len(_utf8(before, place)))

    def messages(name: str, role: str) -> object:
        return [{"role": role, "content": row[name]}] if isinstance(row.get(name), str) else row.get(name)

    asked, said = messages(prompt, "user"), messages(answer, "assistant")
    return chat_document(place, asked, row.get(TOOLS), prompt, answer=(answer, said))


def preferred(row: Mapping[str, Any], place: str) -> Document:
    """Make a document of the chosen answer of a row and its prompt. Only the answer counts in the loss.

    As in TRL, texts are only the answer, as are messages that begin with the assistant's. Messages that begin with
    another role have the prompt: its messages, or the one that has its text. Raises DataError if a text begins with its
    prompt, which may be the prompt or part of the answer, and if messages have neither form. The prompt is not empty.
    https://huggingface.co/docs/trl/dataset_formats
    """
    prompt, chosen = row[_PROMPT], row[_CHOSEN]
    if isinstance(prompt, str) and isinstance(chosen, str) and chosen.startswith(prompt):
        message = (
            f"{_CHOSEN!r} begins with its {_PROMPT!r}, so it may contain the prompt, or be an answer that repeats it"
        )
        hint = f"remove the prompt from {_CHOSEN!r}; if the answer repeats it, rename {_CHOSEN!r} to 'completion'"
        raise DataError(message, key=place, hint=hint)
    first = chosen[0] if isinstance(chosen, list) and isinstance(chosen[0], dict) else {}
    if isinstance(chosen, str) or SPEAKERS.get(str(first.get("role", first.get("from")))) == "assistant":
        return answered(row, _PROMPT, _CHOSEN, place)

    contents = [one.get("content", one.get("value")) if isinstance(one, dict) else None for one in chosen]
    ends = [number for number, one in enumerate(contents, start=1) if isinstance(prompt, str) and one == prompt]
    if isinstance(prompt, list) and chosen[: len(prompt)] == prompt:
        ends = [len(prompt)]
    if len(ends) != 1:
        found = "more than one message with the text of" if ends else "neither an answer alone nor the messages of"
        message = f"{_CHOSEN!r} has {found} its {_PROMPT!r}, so where its answer begins is not certain"
        hint = f"write the messages of the answer alone in {_CHOSEN!r}, the first one of the assistant"
        raise DataError(message, key=place, hint=hint)
    return chat_document(place, chosen[: ends[0]], row.get(TOOLS), _CHOSEN, answer=(_CHOSEN, chosen[ends[0] :]))


def text_of(row: Mapping[str, Any], name: str, place: str) -> str:
    """Return the text in a field of a row; "" if there is none. Raises DataError for another type."""
    text = row.get(name)
    if text is not None and not isinstance(text, str):
        raise DataError(f"field {name!r} is not a string", key=place, hint="write a text")
    return text or ""


def _utf8(text: str, place: str) -> bytes:
    """Encode a text. Raises DataError if it contains an unpaired surrogate."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        surrogate = f"\\u{ord(text[error.start]):04x}"
        message = f"contains an unpaired surrogate, {surrogate}, at character {error.start} of its text"
        raise DataError(message, key=place, hint="fix or remove the line") from error


def _pair(prompt: str, answer: str) -> Shape:
    """The shape of rows with a prompt and its answer in these fields."""
    fields, what = (prompt, answer), "prompts and their completions"
    return Shape(what, fields, (TOOLS,), lambda row, place: answered(row, prompt, answer, place))


# By the value of data.field.
SHAPES: Mapping[str, Shape] = {
    MESSAGES: Shape("chats", (MESSAGES,)),
    CONVERSATIONS: Shape("chats of ShareGPT", (CONVERSATIONS,), lists=True),
    "alpaca": Shape("instructions of Alpaca and their outputs", ("instruction", "output"), _OF_ALPACA, alpaca),
    "prompt_completion": _pair(_PROMPT, "completion"),
    "input_ids": Shape("token ids", ("input_ids",), lists=True),
}


def shape_of(field: str) -> Shape | None:
    """Return the known shape of rows that a value of `data.field` names, or the one of PROMPT+ANSWER; else None."""
    prompt, plus, answer = field.partition("+")
    return _pair(prompt, answer) if plus and prompt and answer else SHAPES.get(field)


def chosen_field(fields: Mapping[str, bool], field: str, place: str) -> str:
    """Return what `data.field` is for files whose first row has these fields, with whether each is a list.

    It is `field`, unless this is `text`, which the row does not have, and the row has one known shape. Raises DataError
    if it has several.
    """
    if field != TEXT or TEXT in fields:
        return field
    found = [
        name
        for name, shape in SHAPES.items()
        if all(one in fields for one in shape.fields) and (fields[shape.fields[0]] or not shape.lists)
    ]
    if len(found) > 1:
        message = f"has no field {TEXT!r}, but {' and '.join(SHAPES[one].what for one in found)}"
        raise DataError(message, key=place, hint=f"set data.field={' or data.field='.join(found)}")
    return found[0] if found else field


def chosen_line(blocks: Sequence[Block], field: str) -> str | None:
    """Return a line about the documents of blocks if they are not in `field`, as the config says; else None."""
    found = getattr(blocks[0], "field", field) if blocks else field
    if found == field:
        return None
    return (
        f"{blocks[0].files[0]} has no field {field!r}: documents are {SHAPES[found].what}, as data.field={found} says"
    )


def fields_beside(field: str, contents: Literal["text", "ids", "chat"]) -> tuple[str, ...]:
    """Return the names of optional fields that belong to a text, token ids or a chat in `field`."""
    if contents == "ids":
        return MASKS
    prompt = (_PROMPT,) if field == _CHOSEN else ()
    return prompt if contents == "text" else (TOOLS, *prompt, *((_SYSTEM,) if field == CONVERSATIONS else ()))


def read_lately(field: str, beside: Iterable[str], keys: Iterable[str]) -> str:
    """Return what decides the documents in `field` that the first versions did not read, with ", " between.

    `beside` are the other fields that are read, `keys` those of its messages. It is part of the fingerprint of the
    documents, so that a run of such a version is not resumed with other documents.
    """
    lately = [name for name in beside if name == _PROMPT or (name in MASKS and name != LOSS_MASK)]
    return ", ".join([*lately, *(f"{field}.{key}" for key in FLAGS if key in keys)])


def read_lately_of(row: Mapping[str, Any], field: str) -> str:
    """Return the same for rows like this one."""
    value = row.get(field)
    if value is None:
        return ""
    contents: Literal["text", "ids", "chat"] = (
        "chat" if is_chat(value, field) else "ids" if isinstance(value, list) else "text"
    )
    beside = [name for name in fields_beside(field, contents) if row.get(name) is not None and name != field]
    messages = value if isinstance(value, list) else []
    return read_lately(field, beside, {key for one in messages if isinstance(one, dict) for key in one})


def row_document(row: Mapping[str, Any], field: str, place: str) -> Document:
    """Make the document of a row: a text, token ids (a list or an array) or a chat in `field`, or a known shape.

    Raises DataError if it is not usable.
    """
    # The field may be a shape of several fields, all of which need a value.
    if field not in row:
        shape = shape_of(field)
        if shape is None or shape.read is None:
            raise no_such_field(place, field, list(row), "field")
        for name in shape.fields:
            if row.get(name) is None:
                hint = f"write one, or remove the row; data.field={field} reads {' and '.join(shape.fields)}"
                raise DataError(f"has no value in field {name!r}", key=place, hint=hint)
        return shape.read(row, place)
    # In preference data (DPO), an answer in `chosen` belongs to the `prompt` of the same row; otherwise `prompt` is not
    # read.
    value, prompt = row[field], row.get(_PROMPT)
    preference = field == _CHOSEN and prompt is not None and not (isinstance(prompt, str | list) and not prompt)
    if is_chat(value, field):
        if row.get(LOSS_MASK) is not None:
            raise mask_without_ids(place, field, "chat")
        if preference:
            return preferred(row, place)
        shared = field == CONVERSATIONS and any("from" in one for one in value if isinstance(one, dict))
        system = text_of(row, _SYSTEM, place) if shared else ""
        return chat_document(place, value, row.get(TOOLS), field, system=system)
    # A chat is a list too, so only other lists are token ids.
    if isinstance(value, (list, np.ndarray)):
        return token_document(place, row, field)
    if not isinstance(value, str):
        message, hint = f"field {field!r} is not a string", "set data.field to a field with text, token ids, or chats"
        raise DataError(message, key=place, hint=hint)
    if row.get(LOSS_MASK) is not None:
        raise mask_without_ids(place, field)
    if preference:
        return preferred(row, place)
    return Document(place, _utf8(value, place))


def mask_without_ids(place: str, field: str, what: str = "text") -> DataError:
    """Create the DataError for a document with a mask whose `field` is a text, or another kind of `what`."""
    hint = f"set data.field to the token ids, such as data.field=input_ids, or remove {LOSS_MASK!r}"
    return DataError(f"has {LOSS_MASK!r}, which belongs to token ids, but {field!r} is a {what}", key=place, hint=hint)


def choose_field(fields: Sequence[str]) -> str:
    """Return the hint that offers the first eight of some fields."""
    if len(fields) == 1:
        return f"set data.field={fields[0]}"
    return f"set data.field to one of {', '.join(map(repr, fields[:8]))}"


def no_such_field(place: str, field: str, fields: Sequence[str], what: str) -> DataError:
    """Create the DataError for a `field` that a document does not have; `what` is the word for it."""
    close = nearest(field, fields)
    hint = f"did you mean data.field={close}?" if close is not None else choose_field(fields)
    if field == TEXT and {_CHOSEN, _REJECTED} <= {*fields}:
        hint = f"set data.field={_CHOSEN} to train on the chosen answers"
    return DataError(f"has no {what} {field!r}", key=place, hint=hint if fields else "it has no fields: remove it")
