"""An incomplete folder of weights is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import DataError
from engine.weights.folder import INDEX, SINGLE, read_headers
from tests.refusals import refused
from tests.weights.folders import llama, saved


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(llama(), tmp_path, "40KB")


def test_headers_are_those_of_the_tensors(folder: Path) -> None:
    state = llama(torch.bfloat16).state_dict()
    found = read_headers(saved(llama(torch.bfloat16), folder / "bf16"))
    assert {name: header.shape for name, header in found.items()} == {n: tuple(t.shape) for n, t in state.items()}
    assert {header.dtype for header in found.values()} == {"BF16"}
    assert {header.file for header in found.values()} == {SINGLE}
    several = {header.file for header in read_headers(folder).values()}
    assert len(several) > 1 and several == {path.name for path in folder.glob("*.safetensors")}


def test_a_missing_shard(folder: Path) -> None:
    first, *others = sorted(folder.glob("*.safetensors"))
    first.unlink()
    with refused(DataError, folder) as problems:
        read_headers(folder)
    assert first.name in problems[0].message
    for shard in others:
        shard.unlink()
    with pytest.raises(DataError) as caught:
        read_headers(folder)
    assert len(caught.value.problems) == 1 + len(others)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_shard_that_is_cut_short(folder: Path, keep: int) -> None:
    shard = max(folder.glob("*.safetensors"))
    whole = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:keep])
    with refused(DataError, shard) as problems:
        read_headers(folder)
    assert shard.name in str(problems[0].hint)
    if keep == -1:
        assert f"{whole - 1:,}" in problems[0].message and f"{whole:,}" in problems[0].message


def test_a_shard_that_is_too_long(folder: Path) -> None:
    shard = max(folder.glob("*.safetensors"))
    whole = shard.stat().st_size
    shard.write_bytes(shard.read_bytes() + b"more")
    with refused(DataError, ".../model-00004-of-00004.safetensors") as problems:
        read_headers(folder)
    assert f"{whole + 4:,}" in problems[0].message and f"{whole:,}" in problems[0].message


def test_other_files_with_the_name_of_a_shard(folder: Path) -> None:
    shard = max(folder.glob("*.safetensors"))
    good = shard.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
    expected = {b"<html>not found</html>": "safetensors", pointer: "Git LFS"}
    expected |= {
        good.replace(b'"F32"', b'"F64"', 1): "header",
        b"\2" + bytes(7) + b"{}..": "safetensors",
    }
    for content, why in expected.items():
        shard.write_bytes(content)
        with refused(DataError, shard) as problems:
            read_headers(folder)
        assert why in problems[0].message
    shard.unlink()
    (folder / SINGLE).mkdir()
    with refused(DataError, ".../model.safetensors"):
        read_headers(folder)


def test_shards_without_their_index(folder: Path) -> None:
    (folder / INDEX).unlink()
    first, *others = sorted(folder.glob("*.safetensors"))
    with refused(DataError, folder) as problems:
        read_headers(folder)
    assert f"{first.name} and {len(others)} " in problems[0].message and INDEX in problems[0].message
    for shard in others:
        shard.unlink()
    with refused(DataError, folder) as problems:
        read_headers(folder)
    assert f"{first.name}, " in problems[0].message and SINGLE in str(problems[0].hint)


def test_a_tensor_that_its_shard_does_not_hold(folder: Path) -> None:
    shard = max(folder.glob("*.safetensors"))
    save_file({"other": torch.zeros(1)}, shard)
    with refused(DataError, ".../model.safetensors.index.json") as problems:
        read_headers(folder)
    assert shard.name in problems[0].message


def test_the_first_ten_problems_are_listed(folder: Path) -> None:
    index = {f"t{number}": f"{number}.safetensors" for number in range(13)}
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    with pytest.raises(DataError) as caught:
        read_headers(folder)
    assert len(caught.value.problems) == 11
    assert caught.value.problems[-1].message == "and 3 more missing shards"
    assert [bool(one.hint) for one in caught.value.problems] == [True] + 10 * [False], "an equal hint is shown once"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}']
)
def test_invalid_indexes(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text)
    with refused(DataError):
        read_headers(folder)


def test_an_index_may_not_name_files_of_other_folders(folder: Path) -> None:
    """An import copies them by name."""
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with refused(DataError, ".../model.safetensors.index.json"):
        read_headers(folder)


def test_no_weights_at_all(tmp_path: Path) -> None:
    with refused(DataError, tmp_path):
        read_headers(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(DataError) as caught:
        read_headers(tmp_path)
    assert "safe_serialization" in str(caught.value.problems[0].hint)


def test_a_tensor_in_two_shards(folder: Path) -> None:
    """Programs read one or the other, so they must be the same; the index names the file that is read."""
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    before, name = read_headers(folder), "model.norm.weight"
    other = next(file for file in sorted(set(index.values()), reverse=True) if file != index[name])
    tensors = load_file(folder / other)
    same = llama().state_dict()[name]
    save_file({**tensors, name: same}, folder / other)
    assert read_headers(folder)[name] == before[name]
    for changed in (same + 1, same[:-1].clone(), same.to(torch.bfloat16)):
        save_file({**tensors, name: changed}, folder / other)
        with pytest.raises(DataError) as caught:
            read_headers(folder)
        (problem,) = caught.value.problems
        assert problem.message.startswith(f"{name} is in ") and other in problem.message and problem.hint
