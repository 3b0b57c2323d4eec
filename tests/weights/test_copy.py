"""An import is checked completely before anything is written, and prints the overrides to train with."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config.keys import leaves
from engine.config.load import load
from engine.errors import BytescaleError, ConfigError, DataError
from engine.weights.check import check_weights
from engine.weights.copy import import_weights
from engine.weights.folder import INDEX
from tests.presets import LLAMA7B_256K
from tests.weights.folders import llama, saved


@pytest.mark.parametrize("shard", ["30KB", "5GB"])
def test_a_copy_is_byte_for_byte(tmp_path: Path, shard: str) -> None:
    folder, out = saved(llama(), tmp_path / "theirs", shard), tmp_path / "ours"
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes.json").write_text("{}")
    found = import_weights(folder, out)
    files = {path.name for path in folder.iterdir()} - {"notes.json"}
    assert f"data.tokenizer={out}" in found["overrides"]
    assert {path.name for path in out.iterdir()} == files
    assert all((out / name).read_bytes() == (folder / name).read_bytes() for name in files)
    assert (INDEX in files) == (shard == "30KB")
    assert found["parameters"] == sum(parameter.numel() for parameter in llama().parameters())
    assert found["shards"] == len(list(out.glob("*.safetensors")))


def test_its_overrides_make_a_recipe_fit(tmp_path: Path) -> None:
    folder = saved(llama(tie_word_embeddings=True), tmp_path / "with a space")
    found = import_weights(folder, None)
    config = load([*LLAMA7B_256K, *found["overrides"]])
    assert config.run.weights == str(folder)
    every = {text.partition("=")[0] for text in found["overrides"]}
    assert every == {*(key for key in leaves() if key.startswith("model.")), "run.weights"}
    assert config.model.model_dump(mode="json") == found["model"]
    assert check_weights(folder, config) == []


def change(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide num_attention_heads=4"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a whole number above 0, not 0"),
        ({"hidden_size": "wide"}, 'hidden_size must be a whole number above 0, not "wide"'),
        ({"vocab_size": "${run.seed}x"}, "vocab_size must be"),
        ({"vocab_size": {"a": 1}}, "vocab_size must be"),
        ({"hidden_size": 36, "head_dim": None}, "hidden_size: 36 is not a multiple of 2 x num_attention_heads=4"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type: yarn needs parameters that are not set"),
    ],
)
def test_an_invalid_config_json_is_refused(tmp_path: Path, values: dict[str, Any], expected: str) -> None:
    folder = saved(llama(), tmp_path / "theirs")
    change(folder, **values)
    with pytest.raises(DataError) as caught:
        import_weights(folder, tmp_path / "ours")
    assert expected in caught.value.problems[0].message
    assert caught.value.problems[0].key == str(folder / "config.json")
    assert caught.value.problems[0].hint
    assert not (tmp_path / "ours").exists()


def refuse(folder: Path, out: Path | None) -> BytescaleError:
    with pytest.raises(BytescaleError) as caught:
        import_weights(folder, out)
    return caught.value


@pytest.mark.parametrize("shard", ["30KB", "5GB"])
def test_tensors_that_are_not_finite_are_named_and_not_copied(tmp_path: Path, shard: str) -> None:
    model = llama()
    with torch.no_grad():
        model.lm_head.weight[257, 31] = math.nan
        model.model.norm.weight[0] = -math.inf
    folder = saved(model, tmp_path / "theirs", shard)
    for out in (None, tmp_path / "ours"):
        error = refuse(folder, out)
        assert isinstance(error, DataError)
        assert str(error) == "NaN or infinity in lm_head.weight, model.norm.weight"
        assert error.problems[0].key == str(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_a_folder_is_not_imported_into_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint says that training can read this folder; that the target exists would not help."""
    folder = saved(llama(), tmp_path / "theirs")
    (tmp_path / "link").symlink_to("theirs")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.chdir(folder)
    for source, out in product((folder, Path(), tmp_path / "link"), repeat=2):
        error = refuse(source, out)
        assert isinstance(error, ConfigError)
        assert str(error) == "is the folder being imported"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"theirs", "link"}


def test_an_incomplete_folder_is_not_copied(tmp_path: Path) -> None:
    folder, out = saved(llama(), tmp_path / "theirs", "30KB"), tmp_path / "ours"
    last = max(folder.glob("*.safetensors"))
    content = last.read_bytes()
    last.write_bytes(content[:-1])
    assert "cut short" in str(refuse(folder, out))
    last.unlink()
    assert "is missing" in str(refuse(folder, out))
    last.write_bytes(content)
    out.mkdir()
    (out / "precious").write_text("")
    assert isinstance(refuse(folder, out), ConfigError)
    assert [path.name for path in out.iterdir()] == ["precious"]
    assert isinstance(refuse(tmp_path / "nowhere", tmp_path / "b"), DataError)
