"""Stop tokens go from the weights of a run, its documents and its chat template to what it exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import DataError
from engine.weights.generation import generation_config, read_generation, stop_tokens
from tests.refusals import refused


def folder_of(folder: Path, generation: Any, config: Any = None) -> Path:
    (folder / "tokenizer.json").write_text("{}")
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("facts", "stops", "written"),
    [
        ({}, [], {}),
        ({"bos": 1, "eos": 2}, [2], {"bos_token_id": 1, "eos_token_id": 2}),
        ({"bos": None, "eos": 2, "end_of_turn": 2}, [2], {"eos_token_id": 2}),
        ({"eos": 2, "end_of_turn": 4}, [2, 4], {"eos_token_id": [2, 4]}),
        (
            {"bos": 1, "eos": 2, "end_of_turn": 4, "generation": {"eos_token_id": [9, 4], "temperature": 0.6}},
            [9, 4, 2],
            {"bos_token_id": 1, "eos_token_id": [9, 4, 2], "temperature": 0.6},
        ),
        ({"generation": {"eos_token_id": 7}}, [7], {"eos_token_id": 7}),
    ],
)
def test_each_token_that_ends_a_text_is_written_once(
    facts: dict[str, Any], stops: list[int], written: dict[str, Any]
) -> None:
    assert stop_tokens(facts) == stops and generation_config(facts) == written


def test_what_weights_say(tmp_path: Path) -> None:
    config = {"eos_token_id": [2, 3], "bos_token_id": 1, "vocab_size": 9, "pad_token_id": None}
    assert read_generation(folder_of(tmp_path, None, config)) == {"eos_token_id": [2, 3], "bos_token_id": 1}
    assert read_generation(folder_of(tmp_path, {"eos_token_id": 4, "top_p": 0.9}, config)) == {
        "eos_token_id": 4,
        "top_p": 0.9,
    }
    (tmp_path / "tokenizer.json").unlink()
    assert read_generation(tmp_path) == read_generation(tmp_path, 2) == {}, "nobody knows what these ids are"
    assert read_generation(tmp_path, 4)["eos_token_id"] == 4


@pytest.mark.parametrize("eos", ["</s>", [2, "3"], -1, True, [[2]], 2.0])
def test_ids_that_are_none_are_refused(eos: object, tmp_path: Path) -> None:
    with refused(DataError, f"{tmp_path}/generation_config.json") as problems:
        read_generation(folder_of(tmp_path, {"eos_token_id": eos}, {}))
    assert "eos_token_id" in problems[0].message
    assert problems[0].key == str(tmp_path / "generation_config.json")
