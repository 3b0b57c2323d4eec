"""Documents that are chats: lists of messages with a role and content, as chat templates take them."""

from __future__ import annotations

from typing import Any

from engine.data.sources.source import Document, Message
from engine.errors import DataError
from engine.readers import check_depth, parse_line

MESSAGES = "messages"  # a field of this name has chats, also if they are strings of JSON
TOOLS = "tools"  # the field beside a chat with the tools that the assistant may call


def is_chat(value: object, field: str) -> bool:
    """Return whether a value of JSON in `field` is a chat: a list of objects, or a string in a field for chats alone.

    A string in any other field is a text, also if it reads like a chat.
    """
    if isinstance(value, list):
        return any(isinstance(one, dict) for one in value)
    return isinstance(value, str) and field == MESSAGES


def chat_document(place: str, messages: object, tools: object, field: str) -> Document:
    """Make a document of the chat in `field`: a list of messages, or that as a string of JSON, and likewise its tools.

    A list of text parts as the content of a message is joined to a string, which all templates of text models take. An
    empty list is an empty document. Raises DataError if the chat is not usable.
    """
    found = _from_json(place, messages, field)
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        hint = 'write [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
        raise DataError(f"{field!r} is not a list of messages", key=place, hint=hint)
    if not found:
        return Document(place, b"")
    chat = [_message(place, one, f"{field}[{number}]") for number, one in enumerate(found)]
    if not any(message["role"] == "assistant" for message in chat):
        roles = ", ".join(sorted({message["role"] for message in chat}))
        hint = "remove the document: only what the assistant says is trained on"
        raise DataError(f"{field!r} has no message of the role assistant, only of {roles}", key=place, hint=hint)
    offered = _from_json(place, tools, TOOLS)
    if offered is not None and not (isinstance(offered, list) and all(isinstance(one, dict) for one in offered)):
        raise DataError(f"{TOOLS!r} is not a list of objects", key=place, hint="write a JSON schema for each tool")
    return Document(place, None, messages=chat, tools=offered or None)


def _from_json(place: str, value: object, field: str) -> object:
    """Parse a string as JSON; return any other value as it is. Raises DataError if it is too deep for templates."""
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


def _message(place: str, message: Message, name: str) -> Message:
    """Check a message, join its text parts, and leave out keys without a value, which templates would take for set."""
    message = {key: value for key, value in message.items() if value is not None}
    if not (isinstance(message.get("role"), str) and message["role"]):
        hint = "name the speaker of each message: system, user, assistant or tool"
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
