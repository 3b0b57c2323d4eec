"""Documents that are chats: lists of messages with a role and content, as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from engine.data.sources.source import Document, Message
from engine.errors import DataError
from engine.readers import check_depth, parse_line

MESSAGES = "messages"  # a field of this name has chats, also if they are strings of JSON
CONVERSATIONS = "conversations"
TOOLS = "tools"  # the field beside a chat with the tools that the assistant may call
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")  # that templates of models support
FLAGS = ("weight", "train", "trainable", "loss_mask")  # of a message: whether it is trained on
SPEAKERS = {  # of ShareGPT -> roles
    **{name: name for name in ROLES},
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "model", "bot", "bing", "bard"), "assistant"),
    **dict.fromkeys(("observation", "function_response"), "tool"),
}
_WRITE = 'write [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'


def is_chat(value: object, field: str) -> bool:
    """Return whether a value of JSON in `field` is a chat: a list of objects, or a string in a field for chats alone.

    A string in any other field is a text, even if it looks like a chat.
    """
    if isinstance(value, list):
        return any(isinstance(one, dict) for one in value)
    return isinstance(value, str) and field == MESSAGES


def chat_document(
    place: str,
    messages: object,
    tools: object,
    field: str,
    *,
    system: str = "",
    answer: tuple[str, object] | None = None,
) -> Document:
    """Make a document of the chat in `field`: a list of messages, or that as a string of JSON, and likewise its tools.

    Messages of ShareGPT, with `from` and `value`, get a role and content, unless the field is `messages`; `system` is
    the system prompt of another field. With `answer`, a field with messages that follow those of `field`, these alone
    count in the loss. A list of text parts as the content of a message is joined to a string, which all templates of
    text models take. An empty list is an empty document. Raises DataError if the chat is not usable.
    """
    # Messages of the answer follow those of `field`. `names` has the place of each one, for error messages.
    found = _messages(place, messages, field)
    names, first = [f"{field}[{number}]" for number in range(len(found))], 0
    if answer is not None:
        more = _messages(place, answer[1], answer[0])
        found, first = [*found, *more], len(found)
        names += [f"{answer[0]}[{number}]" for number in range(len(more))]
    if not found:
        return Document(place, b"")
    if field != MESSAGES and all("from" in one and "value" in one for one in found):
        found = [_spoken(place, one, name) for one, name in zip(found, names, strict=True)]
    chat = [_message(place, one, name) for one, name in zip(found, names, strict=True)]
    # Nothing of such a chat would count in the loss, which is nearly always a mistake in the roles.
    if not any(message["role"] == "assistant" for message in chat):
        roles = list(dict.fromkeys(message["role"] for message in chat))
        message = f"{field!r} has no message of the role assistant, only of {', '.join(sorted(roles))}"
        raise DataError(message, key=place, hint=_no_answer(roles))
    flags = [_flag(place, one, name) for one, name in zip(chat, names, strict=True)]
    if system.strip():
        chat, flags, first = [{"role": "system", "content": system}, *chat], [None, *flags], first and first + 1
    # None means that all messages of the assistant count. Flags, or a prompt before the answer, exclude some.
    trained = None
    if first or flags.count(None) < len(flags):
        answers = [message["role"] == "assistant" and number >= first for number, message in enumerate(chat)]
        trained = [flag is not False and answers[number] for number, flag in enumerate(flags)]
    # An empty string means no tools: columns of strings have no other empty value.
    offered = _from_json(place, tools, TOOLS) if not isinstance(tools, str) or tools.strip() else None
    if offered is not None and not (isinstance(offered, list) and all(isinstance(one, dict) for one in offered)):
        raise DataError(f"{TOOLS!r} is not a list of objects", key=place, hint="write a JSON schema for each tool")
    return Document(place, None, messages=chat, tools=offered or None, trained=trained)


def _messages(place: str, messages: object, field: str) -> list[Message]:
    """Return a list of messages, which may be a string of JSON. Raises DataError for anything else."""
    found = _from_json(place, messages, field)
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise DataError(f"{field!r} is not a list of messages", key=place, hint=_WRITE)
    return list(found)


def _from_json(place: str, value: object, field: str) -> object:
    """Parse a string as JSON; return any other value unchanged. Raises DataError if it is too deep for templates."""
    found = value
    if isinstance(value, str):
        try:
            found = parse_line(value)
        except ValueError as error:
            hint = f"write the list itself, or as JSON; for texts, use another name than {field!r}"
            raise DataError(f"{field!r} is a string, but not one of JSON", key=place, hint=hint) from error
    try:
        check_depth(found)
    except ValueError as error:
        raise DataError(f"{field!r} {error}", key=place, hint="remove the document") from error
    return found


def _no_answer(roles: Sequence[str]) -> str:
    """Return the hint for a chat of these roles, none of which is `assistant`."""
    if not (others := [role for role in roles if role not in ROLES]):
        return "remove the document: only messages of the assistant are trained on"
    known = {role: SPEAKERS.get(role.strip().lower(), "") for role in others}
    answers = [role for role, meant in known.items() if meant == "assistant"] or others[-1:]
    asks = [f", and the role user for {role!r}" for role, meant in known.items() if meant == "user"]
    return f"write the role assistant for {answers[0]!r}, which answers{''.join(asks)}"


def _spoken(place: str, message: Message, name: str) -> Message:
    """Give a message of ShareGPT a role and content for `from` and `value`. Raises DataError for an unknown speaker."""
    role = SPEAKERS.get(str(message["from"]))
    if role is None:
        hint = f"write one of {', '.join(SPEAKERS)}"
        raise DataError(f"{name} is from {message['from']!r}, which is not a known role", key=place, hint=hint)
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {"role": role, "content": message["value"], **rest}


def _message(place: str, message: Message, name: str) -> Message:
    """Check a message, join its text parts, and remove keys without a value, which templates would treat as set."""
    message = {key: value for key, value in message.items() if value is not None}
    if not (isinstance(message.get("role"), str) and message["role"]):
        hint = 'write the "role" of each message, system, user, assistant or tool, and its "content"'
        if {"from", "value"} <= message.keys():
            hint = (
                '"from" and "value" are "role" and "content" here, human is user and gpt is assistant; '
                f"ShareGPT's form is read from a field named {CONVERSATIONS}"
            )
        raise DataError(f"{name} has no 'role'", key=place, hint=hint)
    content = message.get("content")
    if content is None and "tool_calls" in message:
        return message
    parts: list[Any] = [content]
    if isinstance(content, list):
        parts = [one.get("text") if isinstance(one, dict) and one.get("type") == "text" else None for one in content]
    if not all(isinstance(part, str) for part in parts):
        hint = 'write a string, or a list of {"type": "text", "text": "..."}'
        raise DataError(f"{name} has a 'content' that is neither a text nor a list of texts", key=place, hint=hint)
    return {**message, "content": "".join(parts)}


def _flag(place: str, message: Message, name: str) -> bool | None:
    """Take the flags out of a message, and return whether it is trained on; None if it has none.

    Raises DataError for a value that is neither 0 nor 1, for flags that differ, and for a 1 on a message of another
    role than the assistant.
    """
    found = {key: message.pop(key) for key in FLAGS if key in message}
    for key, value in found.items():
        if value not in (0, 1):
            hint = "write 1 for a message that is trained on, 0 for one that is not"
            raise DataError(f"{name} has the {key} {json.dumps(value)}, not 0 or 1", key=place, hint=hint)
    if len(set(map(bool, found.values()))) > 1:
        raise DataError(f"{name} has {' and '.join(found)} that differ", key=place, hint="remove all but one")
    if any(found.values()) and message["role"] != "assistant":
        key = next(iter(found))
        hint = f"write 0, or leave out {key}: only messages of the assistant are trained on"
        raise DataError(f"{name}, of the {message['role']}, has the {key} 1", key=place, hint=hint)
    return None if not found else any(found.values())
