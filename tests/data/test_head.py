from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from engine.config.load import load
from engine.data.blocks.known import LengthsCache
from engine.data.blocks.local_blocks import _opened
from engine.data.head import Piece, decode, first_tokens, step_after, step_of_run
from engine.data.history import History
from engine.data.overview import Corpora
from engine.data.pack import pack
from engine.data.steps import Cursor
from engine.data.tokenizers.bytes import BOS, EOS
from engine.data.tokenizers.load import open_tokenizer
from engine.errors import DataError
from tests.data.past_run import run_of
from tests.data.token_files import megatron
from tests.refusals import refused

SIZES = ["context=16", "capacity=16", "batch_tokens=64"]


def none(done: int, wanted: int) -> None:
    """Progress that nobody wants to see."""


def pieces(ids: list[int], counted: list[bool], tokenizer: Any = None) -> list[Piece]:
    found = open_tokenizer("bytes") if tokenizer is None else tokenizer
    return decode(found, np.array(ids), np.array(counted, dtype=np.bool_))


def test_special_tokens_are_visible_and_masks_divide_the_text() -> None:
    ids = [BOS, *b"ask", *"\u00e9!".encode(), EOS]
    counted = [False, *[False] * 3, True, True, True, False]
    assert pieces(ids, counted) == [("<BOS>ask", False), ("\u00e9!", True), ("<EOS>", False)]
    assert pieces(ids, [True] * 8) == [("<BOS>ask\u00e9!<EOS>", True)]
    assert pieces([EOS, BOS], [True, True]) == [("<EOS><BOS>", True)]
    assert pieces([97, 300], [True, True]) == [("a<id 300>", True)]
    assert pieces([], []) == []


def test_a_character_that_a_mask_divides_is_shown_as_damaged() -> None:
    first, second = "\u00e9".encode()
    assert pieces([97, first, second, 98], [True, True, False, False]) == [("a\ufffd", True), ("\ufffdb", False)]


def test_spaces_at_the_edges_of_masks_stay(tmp_path: Path) -> None:
    """SentencePiece's decoders remove a space before the first token."""
    model = tokenizers.Tokenizer(models.WordLevel({"\u2581a": 0, "\u2581b": 1, "<s>": 2, "?": 3}, unk_token="?"))
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    model.decoder = decoders.Metaspace()
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "add_bos_token": true}')
    tokenizer = open_tokenizer(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("a b b").tolist() == [0, 1, 1]
    found = pieces([2, 0, 1, 1], [False, False, True, False], tokenizer)
    assert found == [("<s>a", False), (" b", True), (" b", False)]


def test_without_a_tokenizer_ids_are_shown() -> None:
    assert decode(None, np.array([5, 70000]), np.array([False, True])) == [("5 ", False), ("70000 ", True)]


def test_first_tokens_are_those_that_training_reads(tmp_path: Path) -> None:
    """Of pieces of documents too; the first token of a sequence is no label, its last one is only a label."""
    rows = [{"input_ids": [*range(number, number + 40)], "loss_mask": [0, 1] * 20} for number in range(8)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    places = ["data=jsonl", f"data.path={tmp_path / 'a.jsonl'}", "data.field=input_ids", "data.validation_share=0"]
    config = load(["recipe=quickstart", f"data.cache={tmp_path / 'cache'}", *places, *SIZES])
    corpora = Corpora(config)
    table = step_after(corpora.steps, Cursor(), 2, none)
    for tokens in (1, 5, 99):
        found = first_tokens(corpora.sources, config, table, tokens)
        assert len(found) == len(table) and {one.length for one in found} == {16, 7}
        for one, loss_tokens in zip(found, table.loss_tokens.tolist(), strict=True):
            line = int(str(one.place.place).rpartition(":")[2])
            stop = one.start + min(tokens, one.length + 1)
            assert one.ids == rows[line - 1]["input_ids"][one.start : stop]
            assert one.counted == [at > one.start and at % 2 == 1 for at in range(one.start, stop)]
            assert (one.inputs, one.loss_tokens) == (39, loss_tokens)
            if tokens == 99:
                assert sum(one.counted) == one.loss_tokens
            assert "".join(piece.text for piece in one.text) == bytes(one.ids).decode()


def test_steps_of_a_run_are_those_of_its_config(tmp_path: Path) -> None:
    """Finished ones from the ledger, others from the newest checkpoint or the beginning."""
    lines = "".join(json.dumps({"text": "x" * number}) + "\n" for number in range(1, 30))
    (tmp_path / "a.jsonl").write_text(lines)
    folder, config = run_of(tmp_path, "data=jsonl", f"data.path={tmp_path / 'a.jsonl'}", *SIZES, steps=4)
    steps, cursor = Corpora(config).steps, Cursor()
    for step in range(1, 9):
        found = steps.next(cursor)
        assert found is not None
        table, cursor = found
        of_run = step_of_run(History.of(folder.root), step, none)
        assert [column.tolist() for column in vars(of_run).values()] == [
            column.tolist() for column in vars(table).values()
        ]
    (folder.checkpoints / "step-00000003").mkdir(parents=True)
    state = {"step": 3, "cursor": {**cursor.to_json(), "step": 3}, "ranks": 1, "fingerprints": {}, "must_match": {}}
    (folder.checkpoints / "step-00000003" / "manifest.json").write_text(json.dumps({"state": state, "files": {}}))
    following = steps.next(cursor)
    assert following is not None, "the step after the checkpoint is that at its cursor"
    assert step_of_run(History.of(folder.root), 4, none).hash.tolist() != following[0].hash.tolist()
    assert step_of_run(History.of(folder.root), 5, none).hash.tolist() != []


def test_documents_that_are_used_up_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    places = ["data=jsonl", f"data.path={tmp_path / 'a.jsonl'}", "data.validation_share=0", "data.exhausted=stop"]
    config = load(["recipe=quickstart", f"data.cache={tmp_path / 'cache'}", *places])
    with refused(DataError, "--step"):
        step_after(Corpora(config).steps, Cursor(), 3, none)


def test_token_files_are_shown_as_text_if_their_tokenizer_is_known(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "hello"}\n')
    pack(load(["data=jsonl", f"data.path={tmp_path / 'a.jsonl'}"]).data, tmp_path / "ours", workers=1)
    megatron(tmp_path / "theirs", [[[104, 105]]])
    for name, more, text in (
        ("ours", [], "<BOS>hello<EOS>"),
        ("ours", ["data.bos=false"], "256 104 101 108 108 111 257 "),
        ("theirs", [], "104 105 "),
    ):
        places = [f"data.path={tmp_path / name}", "data.validation_share=0", *more, *SIZES]
        config = load(["recipe=quickstart", "data=tokens", *places])
        corpora = Corpora(config)
        (found,) = first_tokens(
            corpora.sources, config, step_after(corpora.steps, Cursor(), 1, none).chosen(slice(1)), 9
        )
        assert "".join(piece.text for piece in found.text) == text
        assert found.place == (f"{tmp_path / name}:document 0", None)


@pytest.mark.parametrize("now", [["x" * number for number in range(1, 30)][::-1], ["a"]])
def test_nothing_is_shown_of_documents_that_have_changed(tmp_path: Path, now: list[str]) -> None:
    """It would be taken for what the step was trained on. Those of the same contents are shown."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * number}) + "\n" for number in range(1, 30)))
    folder, config = run_of(tmp_path, "data=jsonl", f"data.path={path}", *SIZES, steps=1)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in now))
    history = History.of(folder.root)
    table = step_of_run(history, 1, none)
    for one in first_tokens(history.corpora, config, table, 99):
        same = one.document.document == 14 and len(now) == 29
        assert (one.place.problem is None) == (one.inputs is not None) == bool(one.ids) == bool(one.text) == same


def test_loss_tokens_are_those_of_the_documents_that_were_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that is opened once more may have other masks by then. Lengths that are still known are the same."""
    path = tmp_path / "a.jsonl"

    def write(mask: int) -> None:
        rows = [{"input_ids": [number, 1, 2, 3], "loss_mask": [1, 1, 1, mask]} for number in range(40)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.utime(path, (1, mask + 1))

    write(0)
    places = ["data=jsonl", f"data.path={path}", "data.field=input_ids", "data.validation_share=0"]
    config = load(["recipe=quickstart", f"data.cache={tmp_path / 'cache'}", *places, *SIZES])
    steps = Corpora(config).steps
    table = step_after(steps, Cursor(), 1, none)
    assert table.loss_tokens.sum() == 2 * len(table)
    write(1)
    _opened.cache_clear()
    assert step_after(steps, Cursor(), 1, none).loss_tokens.tolist() == table.loss_tokens.tolist()
    monkeypatch.setattr(LengthsCache, "get", lambda cache, block: None)
    with refused(DataError, f"{tmp_path}/a.jsonl"):
        step_after(steps, Cursor(), 1, none)
