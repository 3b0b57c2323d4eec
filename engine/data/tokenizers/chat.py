"""Chats as tokens: the text of a chat template, whose special tokens count as such, and a mask of what is trained on.

Only messages of the assistant count in the loss, including the token that ends each turn; prompts and headers do not. A
token that crosses the boundary of a message counts.

Special tokens come from the template alone: a message that contains the text of one is rejected, since the template
puts all into one text before it is encoded. Tokens that the tokenizer has added but does not call special, such as
`<think>` in many, are ordinary vocabulary, as in texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.data.confined import SECONDS, call
from engine.data.tokenizers.tokenizer import Ids, as_text
from engine.errors import DataError
from engine.readers import read_object, read_text
from engine.units import Ints

TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"  # a folder, with tool_use.jinja and others
CONFIG = "tokenizer_config.json"
_ANSWER = "Hello"  # to find what follows an answer
_RENDER_S = 2e-6  # of a character: ten times as long as usual
SPECIAL = "special_tokens_map.json"
_REPAIR = "repair the file, or remove it"


class ChatCodec(Protocol):
    """A tokenizer that can encode a text with special tokens."""

    def encode_rendered(self, text: str) -> tuple[Ids, Ints]:
        """Return the ids [n] of a text in which special tokens count as such, and the characters that each is made of:
        first and one after the last [n, 2]."""

    def special(self, ids: Ids) -> NDArray[np.bool_]:
        """Return which ids are those of special tokens, [n]."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens by name."""

    @property
    def special_names(self) -> Sequence[str]:
        """The texts of all special tokens."""


@dataclass(frozen=True)
class Chats:
    """Encodes chats. `templates` by name: `default`, and maybe `tool_use` for those with tools. `variables` are the
    special tokens that the templates may name, such as `bos_token`."""

    codec: ChatCodec
    templates: Mapping[str, str]
    variables: Mapping[str, str]

    def encode(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, trained: Sequence[bool] | None
    ) -> tuple[Ids, NDArray[np.bool_]]:
        """Return the ids of a chat, int32 [n], and which count as labels, bool [n]; see `Tokenizer.chat`."""
        from engine.data.tokenizers.template import Rendered, render  # jinja2, which texts do not need

        # Text with a special token is rejected before rendering: afterwards it could not be distinguished from the
        # template's own tokens.
        named = [*((f"messages[{number}]", one) for number, one in enumerate(messages)), ("tools", tools)]
        strings = [(name, text) for name, value in named for text in _strings(value)]
        for name, text in strings:
            if found := self._forbidden.search(text):
                raise _would_be_special(name, found[0], found[0])
        name = "tool_use" if tools and "tool_use" in self.templates else "default"
        if name not in self.templates:
            names = ", ".join(self.templates)
            raise DataError(f"the tokenizer has no default chat template, only {names}", hint=f"copy one to {TEMPLATE}")
        template, size = self.templates[name], sum(len(text) for _, text in strings)
        # A chat is rendered about twice for each message.
        text, spans, marked = call(
            render,
            *(template, self.variables, messages, tools, trained),
            what="the chat template",
            hint="correct it in chat_template.jinja or tokenizer_config.json, or leave the chat out",
            seconds=SECONDS + _RENDER_S * size * len(messages),
        )
        rendered = Rendered(text, spans, marked)
        ids, characters = self.codec.encode_rendered(as_text(rendered.text))
        special, mask = self.codec.special(ids), np.zeros(len(ids), dtype=np.bool_)
        # A normalizer may make a special token of another text, such as of one in capitals or of full width.
        for at in np.flatnonzero(special).tolist():
            text = rendered.text[slice(*characters[at].tolist())].strip()
            if text and not self._forbidden.fullmatch(text):
                for name, one in strings:
                    if text in one:
                        raise _would_be_special(name, text, self.codec.decode([int(ids[at])]))
        # Spans are characters of the text. A token counts if any of its characters lies in a span.
        for start, stop in rendered.spans:
            first = int(np.searchsorted(characters[:, 1], start, side="right"))
            last = int(np.searchsorted(characters[:, 0], stop, side="left"))
            ends = np.flatnonzero(special[first:last])
            # A template without marks often writes a line break after the token that ends the turn. A model never
            # generates it, because it stops at that token.
            if len(ends) and not rendered.marked:
                end = first + int(ends[-1]) + 1
                last = last if rendered.text[int(characters[end - 1, 1]) : stop].strip() else end
            mask[first:last] = True
        return ids, mask

    @cached_property
    def end_of_turn(self) -> int | None:
        """The special token with which the template ends the assistant's messages; None if it uses none."""
        try:
            said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": _ANSWER}]
            ids, mask = self.encode(said, None, None)
        except DataError:
            return None
        answer = ids[mask]
        # The first one after the answer: the template may end the whole chat with another.
        ends = np.flatnonzero(self.codec.special(answer)).tolist()
        return next((int(answer[at]) for at in ends if _ANSWER in self.codec.decode(answer[:at].tolist())), None)

    @property
    def content(self) -> bytes:
        """The properties that determine the ids, besides the codec."""
        return json.dumps([self.templates, self.variables], sort_keys=True).encode()

    @cached_property
    def _forbidden(self) -> re.Pattern[str]:
        from engine.data.tokenizers.template import START, STOP

        names = sorted({START, STOP, *self.codec.special_names}, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names)))


def _would_be_special(name: str, text: str, token: str) -> DataError:
    as_token = "" if text == token else f" {token!r}"
    message = f"{name} contains {text!r}, which would become the special token{as_token}"
    return DataError(message, hint="remove it from the message, or leave the chat out")


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in a value of JSON, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _strings(key)
            yield from _strings(one)
    elif isinstance(value, Sequence):
        for one in value:
            yield from _strings(one)


def read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates in the folder of a tokenizer by name; none if it has none. Files of their own come
    before those in `config`, the content of tokenizer_config.json. Raises DataError if a file cannot be read."""
    found = config.get("chat_template") or {}
    if isinstance(found, str):
        found = {"default": found}
    elif isinstance(found, list):
        found = {
            one["name"]: one["template"] for one in found if isinstance(one, dict) and {"name", "template"} <= set(one)
        }
    templates = {str(name): str(source) for name, source in dict(found).items()}
    files = {"default": folder / TEMPLATE} | {path.stem: path for path in (folder / MORE_TEMPLATES).glob("*.jinja")}
    for name, path in files.items():
        if path.is_file():
            templates[name] = read_text(path, hint=_REPAIR)
    if not templates and (old := folder / "chat_template.json").is_file():
        templates = read_templates(folder / "none", read_settings(old))
    return templates


def read_variables(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that tokenizer_config.json, given as `config`, and special_tokens_map.json name."""
    merged = read_settings(folder / SPECIAL) | {key: value for key, value in config.items() if value is not None}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in merged.items()}
    return {key: text for key, text in texts.items() if key.endswith("_token") and isinstance(text, str)}


def read_settings(path: Path) -> dict[str, Any]:
    """Read a JSON object; an empty one if there is no file. Raises DataError if it is not usable."""
    if not path.exists():
        return {}
    return read_object(path, hint=_REPAIR)
