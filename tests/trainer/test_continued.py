"""Models of Hugging Face go on training on texts and on chats, and come back as folders that transformers uses.

The loss of the first step is that of a plain loop with transformers: the same tokens, and the same of them count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from engine.config.load import load
from engine.launch.run import train
from engine.trainer.export import export_weights
from engine.weights.copy import import_weights
from tests.trainer.continued import CHATS, TEXTS, model_folder
from tests.trainer.worlds import in_worlds

pytestmark = pytest.mark.world


def plain_tokens(documents: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the ids of each document, and its labels: -100 where they do not count, int64 [1, n]."""
    for row in TEXTS if documents == "texts" else CHATS:
        if documents == "texts":
            ids = [*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id]
            counted = [1] * len(ids)
        elif "generation" in tokenizer.chat_template:
            found = tokenizer.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=True)
            ids, counted = found["input_ids"], found["assistant_masks"]
        else:
            text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
            answers = [found.span(1) for found in re.finditer(r"\[/INST\](.*?</s>)", text, re.DOTALL)]
            found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            ids = found["input_ids"]
            counted = [any(b > start and a < stop for start, stop in answers) for a, b in found["offset_mapping"]]
        tokens = torch.tensor([ids])
        yield tokens, torch.where(torch.tensor([counted]) == 1, tokens, -100)


@torch.no_grad()
def plain_loss(model: PreTrainedModel, documents: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Compute the sum over all labels that count, divided by their number."""
    total = torch.zeros((), dtype=torch.float64)
    for tokens, labels in documents:
        logits = model(tokens).logits[0, :-1]
        total += functional.cross_entropy(logits, labels[0, 1:], ignore_index=-100, reduction="sum")
    return total.item() / sum(int((labels[:, 1:] != -100).sum()) for _, labels in documents)


def overrides_of(folder: Path, documents: str, inputs: int, root: Path) -> list[str]:
    """Make a run of one step that takes each document once."""
    found = import_weights(folder, None)
    field = "data.field=messages" if documents == "chats" else "data.field=text"
    sizes = ["context=512", "capacity=256", f"batch_tokens={inputs}", "run.steps=1", "data.validation_share=0"]
    places = [f"data.path={root / 'a.jsonl'}", f"run.out={root / 'run'}", f"data.cache={root / 'cache'}"]
    alone = ["balance.by=none", "balance.z_weight=0"]  # the plain loop has the cross-entropy alone
    return ["recipe=quickstart", "data=jsonl", field, *found["overrides"], *sizes, *places, *alone]


@pytest.mark.parametrize("documents", ["texts", "chats"])
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_a_folder_is_continued_and_exported(
    kind: str, documents: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = model_folder(kind, tmp_path / "theirs")
    tokenizer, model = AutoTokenizer.from_pretrained(theirs), AutoModelForCausalLM.from_pretrained(theirs)
    rows = TEXTS if documents == "texts" else CHATS
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain = list(plain_tokens(documents, tokenizer))
    inputs = sum(tokens.shape[1] - 1 for tokens, _ in plain)
    in_worlds(monkeypatch, 1)
    train(load(overrides_of(theirs, documents, inputs, tmp_path)), say=lambda line: None)
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert line["tokens"] == inputs
    assert line["loss"] == pytest.approx(plain_loss(model, plain), rel=1e-6)

    export_weights(tmp_path / "run", tmp_path / "ours", None, 1 << 30, say=lambda line: None)
    ours = AutoTokenizer.from_pretrained(tmp_path / "ours")
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    question = CHATS[0]["messages"][:1]
    prompts = [
        one.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt") for one in (ours, tokenizer)
    ]
    assert torch.equal(prompts[0]["input_ids"], prompts[1]["input_ids"])
    written = trained.generate(**prompts[0], max_new_tokens=5, do_sample=False)
    assert written.shape[1] > prompts[0]["input_ids"].shape[1] and ours.decode(written[0])
    assert plain_loss(trained, plain) < plain_loss(model, plain), "it has learned from them"
