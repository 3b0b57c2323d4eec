"""Makes chats of prompts and their answers.

The tokenizer's chat template joins the messages, as it does for documents that are chats in their files. So the
template is a part of the tokenizer's fingerprint, and with it of the names of blocks.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from engine.config.schema import Section
from engine.data.sources.chat import MESSAGES, chat_document
from engine.data.transforms.piece import Piece
from engine.errors import DataError

_FIELDS = "is named by data.field: messages, PROMPT+ANSWER, alpaca, or another shape of rows"
_ELSEWHERE = {
    "template": "is that of data.tokenizer: write chat_template.jinja beside its tokenizer.json",
    **dict.fromkeys(("field", "messages", "prompt", "user", "answer", "assistant", "completion"), _FIELDS),
}


class Chat(Section):
    """What is written beside the prompt and the answer."""

    system: str | None = Field(default=None, min_length=1, description="message of the system, for chats without one")

    @model_validator(mode="before")
    @classmethod
    def _has_no_keys_of_others(cls, given: dict[str, object]) -> dict[str, object]:
        for name in given:
            if name in _ELSEWHERE:
                raise ValueError(f"`{name}` {_ELSEWHERE[name]}")
        return given


def chat(piece: Piece, options: Chat) -> list[Piece]:
    """Make a chat of a text with a prompt: the prompt is the user's, the rest the assistant's, which alone counts.

    A chat stays one. Raises DataError for other texts, and for token ids.
    """
    document, system = piece.document, options.system or ""
    if document.messages is not None:
        if not system or document.messages[0]["role"] in ("system", "developer"):
            return [piece]
        messages = [{"role": "system", "content": system}, *document.messages]
        trained = None if document.trained is None else [False, *document.trained]
        return [Piece(document._replace(messages=messages, trained=trained), piece.tokenizer)]
    if document.text is None or not document.prompt:
        what = "token ids" if document.text is None else "a text without a prompt"
        message = f"is {what}, and the transform `chat` makes chats of prompts and their answers"
        hint = "set data.field to the fields of both, PROMPT+ANSWER, or remove `chat` from the transform of its source"
        raise DataError(message, key=document.place, hint=hint)
    texts = {"user": document.text[: document.prompt], "assistant": document.text[document.prompt :]}
    said = [{"role": role, "content": text.decode("utf-8")} for role, text in texts.items()]
    return [Piece(chat_document(document.place, said, None, MESSAGES, system=system), piece.tokenizer)]
