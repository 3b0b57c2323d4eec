r"""Renders chats with the chat templates of Hugging Face's tokenizers, and finds the assistant's messages in the text.

A template may mark them with `{% generation %}` blocks. For a template without marks, the text up to a message of the
assistant (with the prompt for its answer), and the text through it, are compared with the whole:

```
 whole     <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\n ...
 before    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n
 through   <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n
                                                                  ---------------    counts, without the last line break
```

Templates are code from others. They run in Jinja's sandbox, in a process with limits on memory and time (`render` is
called through engine/data/confined.py), with the helpers that transformers provides (source:
transformers/utils/chat_template_utils.py). One helper differs, see `_today`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import date
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import DataError

Spans = list[tuple[int, int]]  # first character, and the one after the last
START, STOP = "\ufdd0", "\ufdd1"  # around what a `{% generation %}` block writes; no text has these noncharacters
_LONGEST, _GROWTH = 1 << 20, 16  # characters that a template may write, and for each one of the chat and its own
_SAID = 500  # characters of a message
_DAY = date(2024, 7, 26)  # the date that Llama 3's templates write without a clock
_REWRITTEN = "the chat template writes messages[:{}] differently when others follow"
_OTHER_PROMPT = "the prompt for messages[{}] is not what the chat template writes before the answer"
_PROMPT = "make both equal in the template, or mark the answers there with {% generation %}"
_SHOWN = 24  # characters of a text before and after a difference
_SPLIT = "end the chat there, or mark the answers with {% generation %} in the template"


class Rendered(NamedTuple):
    """A chat as a text."""

    text: str
    spans: Spans  # the assistant's messages, with the ends of their turns
    marked: bool  # by the template itself, so that the spans are exact


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`: writes the block between START and STOP."""

    tags = {"generation"}  # noqa: RUF012, as in jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marks = [nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (START, STOP)]
        return [marks[0], nodes.Scope(body, lineno=line), marks[1]]


class _Compiled(NamedTuple):
    template: jinja2.Template
    marks: bool  # has `{% generation %}` blocks
    names: set[str]  # of the variables that it reads


def render(
    source: str,
    variables: Mapping[str, str],
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    trained: Sequence[bool] | None = None,
) -> Rendered:
    """Render a chat with a template. `variables` are the names of special tokens, such as `bos_token`.

    The spans are those of the messages that are `trained`; None: all of the assistant. Raises DataError, without the
    document's name, if the template cannot be applied, leaves out the tools or an answer, or if the answers cannot be
    located.
    """
    compiled = _compiled(source)
    # A template is code from others, and may write without end.
    most = _LONGEST + _GROWTH * (len(source) + len(json.dumps([messages, tools], default=str)))
    if tools and "tools" not in compiled.names:
        raise DataError("has tools, which the chat template does not use", hint="remove them, or change the template")

    def text_of(first: int, prompt: bool = False) -> str:
        """Render the first messages, and with `prompt` what stands before the next one of the assistant."""
        try:
            text = compiled.template.render(
                {**variables, "messages": list(messages[:first]), "tools": tools, "add_generation_prompt": prompt}
            )
        except MemoryError:
            raise
        except Exception as error:  # whatever the template's own code raises
            message = f"the chat template cannot be applied to messages[:{first}]: {error}"[:_SAID]
            raise DataError(message, hint="change these messages, or leave the chat out") from error
        if len(text) > most:
            message = f"the chat template writes more than {most:,} characters for messages[:{first}]"
            raise DataError(message, hint="correct the template, or leave the chat out")
        return text

    whole = text_of(len(messages))
    rendered = _unmarked(whole) if compiled.marks else Rendered(whole, [], False)
    said = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    kept = said if trained is None else [number for number in said if trained[number]]
    # A template may shorten an answer or leave it out. What is trained on would then be incomplete, so the last line of
    # each answer must be in the text.
    for number in kept:
        content = str(messages[number].get("content", ""))
        if content.strip().rpartition("\n")[2].strip() not in rendered.text:
            missing = f"the chat template leaves out or changes the end of messages[{number}]"
            raise DataError(missing, hint="change this message, or leave the chat out")
        if compiled.marks:
            continue
        # Without marks, an answer is what lies between the prompt for it and the end of the chat through it. That holds
        # only if the template writes both the same way in the whole chat.
        before, through = text_of(number, prompt=True), text_of(number + 1)
        if not whole.startswith(through):
            raise DataError(f"{_REWRITTEN.format(number + 1)}: {_difference(through, whole)}", hint=_SPLIT)
        if not through.startswith(before):
            prompt = before.startswith(text_of(number)) and through.startswith(text_of(number))
            what = _OTHER_PROMPT if prompt else _REWRITTEN
            raise DataError(
                f"{what.format(number)}: {_difference(before, through)}", hint=_PROMPT if prompt else _SPLIT
            )
        start = len(before)
        if "add_generation_prompt" not in compiled.names:
            # Nothing marks the end of a header, as in `<|assistant|>\nHello`. Mistral's templates have no headers.
            found = max(through.find(content, start), through.find(content.strip(), start))
            start = found if through[start:found].strip() else start
        rendered.spans.append((start, len(through)))
    # With marks, spans are those of all answers, in order, so flags of single messages select among them by position.
    if compiled.marks and len(kept) < len(said):
        if len(rendered.spans) != len(said):
            message = f"the chat template marks {len(rendered.spans)} parts, but the assistant has {len(said)} messages"
            raise DataError(message, hint="remove the flags of single messages, or correct {% generation %} there")
        rendered = rendered._replace(spans=[rendered.spans[said.index(number)] for number in kept])
    if kept and not any(start < stop for start, stop in rendered.spans):
        raise DataError("the chat template writes no text for the answers of the assistant", hint=_SPLIT)
    return rendered


def _difference(one: str, other: str) -> str:
    """Return two texts around the first character in which they differ, for messages."""
    at = next((at for at, pair in enumerate(zip(one, other, strict=False)) if len(set(pair)) > 1), None)
    at = min(len(one), len(other)) if at is None else at
    first, second = (repr(text[max(0, at - _SHOWN) : at + _SHOWN]) for text in (one, other))
    return f"{first}, but {second}"


def _unmarked(text: str) -> Rendered:
    """Return the spans between START and STOP, and the text without these."""
    pieces, starts, spans, length = list[str](), list[int](), Spans(), 0
    for piece in re.split(f"([{START}{STOP}])", text):
        if piece == START:
            starts.append(length)
        elif piece == STOP:
            spans.append((starts.pop(), length))
        else:
            pieces.append(piece)
            length += len(piece)
    return Rendered("".join(pieces), spans, True)


@lru_cache(maxsize=16)
def _compiled(source: str) -> _Compiled:
    """Compile a template. Raises DataError if it is not valid."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise, strftime_now=_today)
    try:
        tree = environment.parse(source)
        marks = any(node.data == START for node in tree.find_all(nodes.TemplateData))
        return _Compiled(environment.from_string(source), marks, meta.find_undeclared_variables(tree))
    except MemoryError:
        raise
    except Exception as error:  # besides errors of Jinja, those of Python's compiler
        message = f"the tokenizer's chat template is not valid: {error}"[:_SAID]
        raise DataError(message, hint="correct it in chat_template.jinja or tokenizer_config.json") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes for HTML of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    """Raise an error in a template: `raise_exception`."""
    raise jinja2.TemplateError(message)


def _today(pattern: str) -> str:
    """The date of today, for templates: always the same day, so that the tokens of a chat do not depend on the date."""
    return _DAY.strftime(pattern)
