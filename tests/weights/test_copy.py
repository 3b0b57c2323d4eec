"""An import is checked wholly before anything is written, and says how to train from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config.load import load
from engine.errors import BytescaleError, ConfigError, DataError
from engine.weights.check import check_weights
from engine.weights.copy import import_weights
from engine.weights.folder import INDEX
from tests.weights.folders import llama, saved


@pytest.mark.parametrize("shard", ["30KB", "5GB"])
def test_a_copy_is_byte_for_byte(tmp_path: Path, shard: str) -> None:
    folder, out = saved(llama(), tmp_path / "theirs", shard), tmp_path / "ours"
    (folder / "tokenizer.json").write_text("{}")
    found = import_weights(folder, out)
    files = {path.name for path in folder.iterdir()} - {"tokenizer.json", "generation_config.json"}
    assert {path.name for path in out.iterdir()} == files
    assert all((out / name).read_bytes() == (folder / name).read_bytes() for name in files)
    assert (INDEX in files) == (shard == "30KB")
    assert found["parameters"] == sum(parameter.numel() for parameter in llama().parameters())
    assert found["shards"] == len(list(out.glob("*.safetensors")))


def test_its_overrides_make_a_recipe_train_from_it(tmp_path: Path) -> None:
    folder = saved(llama(tie_word_embeddings=True), tmp_path / "with a space")
    found = import_weights(folder, None)
    config = load(["recipe=llama7b-256k", *found["overrides"], *found["angles"]])
    assert config.run.weights == str(folder)
    assert config.model.model_dump(mode="json") == found["model"]
    assert check_weights(folder, config) == []


def test_a_recipe_keeps_its_own_angles(tmp_path: Path) -> None:
    """They are for its context; what the weights had is said at the start."""
    folder = saved(llama(), tmp_path / "theirs")
    config = load(["recipe=llama7b-256k", *import_weights(folder, None)["overrides"]])
    assert config.model.rope_theta == load(["recipe=llama7b-256k"]).model.rope_theta
    (said,) = check_weights(folder, config)
    assert "rope_theta" in said


def change(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"num_key_value_heads": 3}, "model.kv_heads: 3 does not divide model.heads=4"),
        ({"num_attention_heads": 0}, "model.heads: must be at least 1, not 0"),
        ({"hidden_size": "wide"}, "model.hidden: is not a whole number: wide"),
        ({"vocab_size": "${run.seed}x"}, "model.vocab"),
        ({"vocab_size": {"a": 1}}, "model.vocab"),
        ({"hidden_size": 36, "head_dim": None}, "model.hidden: 36 is not a multiple of 2 x model.heads=4"),
    ],
)
def test_a_config_that_makes_no_model(tmp_path: Path, values: dict[str, Any], told: str) -> None:
    folder = saved(llama(), tmp_path / "theirs")
    change(folder, **values)
    with pytest.raises(DataError) as caught:
        import_weights(folder, tmp_path / "ours")
    assert told in caught.value.problems[0].message
    assert caught.value.problems[0].key == str(folder / "config.json")
    assert not (tmp_path / "ours").exists()


def refuse(folder: Path, out: Path) -> BytescaleError:
    with pytest.raises(BytescaleError) as caught:
        import_weights(folder, out)
    return caught.value


def test_what_is_not_whole_is_not_copied(tmp_path: Path) -> None:
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
