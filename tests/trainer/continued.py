"""Texts, chats, and tiny models of Hugging Face with a tokenizer, for runs that continue training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.data.tokenizers.chat_folder import CHATML_MARKED, MISTRAL, chat_folder
from tests.weights.folders import llama, mixtral, saved

QUESTIONS = ("What is it?", "And\n\n  then?", "Who?")
ANSWERS = ("A loop: `for a in b:`\n", "That, and no more. é😀", "Nobody, " * 20)
TEXTS = [{"text": f"def f():\n    return {answer!r}"} for answer in ANSWERS]
CHATS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": role, "content": text}
            for question, answer in zip(QUESTIONS[: turns + 1], ANSWERS[turns:] + ANSWERS, strict=False)
            for role, text in (("user", question), ("assistant", answer))
        ]
    }
    for turns in range(3)
]


def model_folder(kind: str, folder: Path) -> Path:
    """Write a tiny model with a tokenizer. The template of one marks what the assistant says, that of the other not."""
    saved(llama(vocab_size=400) if kind == "llama" else mixtral(vocab_size=400), folder)
    return chat_folder(folder, CHATML_MARKED if kind == "llama" else MISTRAL)
