"""Chats of prompts and answers are those that the same messages make. If it fails, others tokens are trained on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.config import schema
from engine.data.corpus import TextCorpus
from engine.data.encode import encode
from engine.data.opening import list_blocks, open_sources
from engine.data.parts import part_path
from engine.data.sources.chat import MESSAGES, chat_document
from engine.data.tokenizers.load import open_tokenizer
from engine.data.tokenizers.tokenizer import Tokenizer
from engine.data.transforms.chat import Chat, chat
from engine.data.transforms.piece import Piece
from engine.errors import DataError
from tests.data.tokenizers.chat_folder import CHATML, LLAMA3, chat_folder
from tests.data.transforms.pieces import of_ids, of_text
from tests.refusals import refused

MakeData = Callable[..., schema.Data]
QUESTION, ANSWER = {"role": "user", "content": "2 + 2 è?"}, {"role": "assistant", "content": "4."}
SYSTEM = {"role": "system", "content": "Be short."}
PROMPT = QUESTION["content"].encode()
TEXT = PROMPT + ANSWER["content"].encode()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_tokenizer(str(chat_folder(tmp_path_factory.mktemp("tokenizer"), CHATML)))


def as_chat(*messages: dict[str, Any]) -> Piece:
    return Piece(chat_document("a.txt", [*messages], None, MESSAGES), of_text(b"").tokenizer)


@pytest.mark.parametrize(
    ("piece", "system", "messages"),
    [
        (of_text(TEXT, len(PROMPT)), None, [QUESTION, ANSWER]),
        (of_text(TEXT, len(PROMPT)), "Be short.", [SYSTEM, QUESTION, ANSWER]),
        (as_chat(QUESTION, ANSWER), None, [QUESTION, ANSWER]),
        (as_chat(QUESTION, ANSWER), "Be short.", [SYSTEM, QUESTION, ANSWER]),
        (as_chat(SYSTEM, QUESTION, ANSWER), "Be long.", [SYSTEM, QUESTION, ANSWER]),
        (as_chat(QUESTION, {**ANSWER, "weight": 0}, QUESTION, ANSWER), "Be short.", None),
    ],
)
def test_a_prompt_and_its_answer_are_encoded_as_a_chat(
    piece: Piece, system: str | None, messages: list[dict[str, Any]] | None, tokenizer: Tokenizer
) -> None:
    (found,) = chat(piece, Chat(system=system))
    messages = messages or [SYSTEM, QUESTION, {**ANSWER, "weight": 0}, QUESTION, ANSWER]
    ids, mask = encode(found.document, tokenizer)
    other, other_mask = encode(chat_document("a.txt", messages, None, MESSAGES), tokenizer)
    assert mask is not None and other_mask is not None and mask.any() and not mask.all()
    assert np.array_equal(ids, other) and np.array_equal(mask, other_mask)


@pytest.mark.parametrize("piece", [of_text(TEXT), of_ids(1, 2, 3)])
def test_only_prompts_with_answers_become_chats(piece: Piece) -> None:
    with refused(DataError, piece.document.place):
        chat(piece, Chat())


def opened(data: schema.Data) -> TextCorpus:
    ((corpus,), _) = open_sources(data, list_blocks(data))
    assert isinstance(corpus, TextCorpus)
    return corpus


def test_the_template_is_in_the_names_of_blocks_and_the_fingerprint_and_its_place_is_in_neither(
    tmp_path: Path, make_data: MakeData
) -> None:
    rows = [{"question": f"{number}?", "answer": str(number)} for number in range(9)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chats = [[{**QUESTION, "content": row["question"]}, {**ANSWER, "content": row["answer"]}] for row in rows]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in chats))

    def of(tokenizer: str, template: str, *steps: Any, field: str = "question+answer", file: str = "a") -> TextCorpus:
        folder = chat_folder(tmp_path / tokenizer, template)
        options = {"format": "jsonl", "field": field, "cache": str(tmp_path / "cache"), "transform": steps}
        return opened(make_data(tmp_path / f"{file}.jsonl", tokenizer=str(folder), **options))

    made = of("one", CHATML, {"chat": {}})
    moved, other = of("two", CHATML, {"chat": {}}), of("three", LLAMA3, {"chat": {}})
    with_system, texts = of("one", CHATML, {"chat": {"system": "Be short."}}), of("one", CHATML)

    def name(corpus: TextCorpus) -> str:
        return str(part_path(corpus.texts.tokens, corpus.texts.folder, corpus.texts.blocks[0]))

    assert (name(made), made.fingerprint) == (name(moved), moved.fingerprint)
    different = [made, other, with_system, texts]
    assert len(set(map(name, different))) == len({one.fingerprint for one in different}) == len(different)

    # What is packed is what the same messages make.
    same = of("one", CHATML, field="messages", file="b").lengths(0)
    assert same.hash().tolist() == made.lengths(0).hash().tolist() and same.runs().tolist()
    assert same.runs().tolist() == made.lengths(0).runs().tolist() != with_system.lengths(0).runs().tolist()
