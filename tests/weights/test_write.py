"""A written folder is complete or absent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from engine.errors import BytescaleError, ConfigError, DataError, StorageError
from engine.weights import write
from engine.weights.config_json import read_config
from engine.weights.folder import INDEX, SINGLE, read_headers
from engine.weights.write import Entry, new_folder, write_weights


def entries(*sizes: int) -> list[Entry]:
    return [Entry(f"t{at}", 4 * size, partial(torch.full, (size,), float(at))) for at, size in enumerate(sizes)]


def written(out: Path, config: dict[str, Any], tensors: list[Entry], shard_bytes: int) -> list[str]:
    with new_folder(out) as draft:
        return write_weights(draft, config, tensors, shard_bytes)


def test_one_shard_needs_no_index(tmp_path: Path) -> None:
    assert written(tmp_path / "a", {"x": 1}, entries(3, 4), 28) == [SINGLE]
    assert {path.name for path in (tmp_path / "a").iterdir()} == {SINGLE, "config.json"}
    assert read_config(tmp_path / "a") == {"x": 1}
    found = load_file(tmp_path / "a" / SINGLE)
    assert torch.equal(found["t1"], torch.ones(4))


def test_shards_hold_as_many_tensors_as_fit_and_at_least_one(tmp_path: Path) -> None:
    """A tensor that is larger than a shard gets a shard by itself."""
    files = written(tmp_path / "a", {}, entries(3, 4, 1, 20, 2), 28)
    assert files == [f"model-0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)]
    headers = read_headers(tmp_path / "a")
    assert [headers[f"t{at}"].file for at in range(5)] == [files[0], files[0], files[1], files[2], files[3]]
    index = json.loads((tmp_path / "a" / INDEX).read_text())
    assert index["metadata"]["total_size"] == 4 * 30
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "a").iterdir()}
    assert len(modes) == 1, "the weights have the permissions of config.json"


def test_a_target_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    written(tmp_path / "empty", {}, entries(1), 8)
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("empty", "file", "link"):
        with pytest.raises(ConfigError, match="already exists") as caught:
            written(tmp_path / name, {}, entries(2), 8)
        assert caught.value.problems[0].key == "--out"
    with pytest.raises(ConfigError, match="cannot write"):
        written(tmp_path / "file" / "below", {}, entries(2), 8)
    assert read_headers(tmp_path / "empty")["t0"].shape == (1,)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError, SafetensorError])
def test_a_failing_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: type[BaseException]
) -> None:
    def full(tensors: dict[str, torch.Tensor], path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        if "t1" in tensors:
            raise failure("No space left on device")

    monkeypatch.setattr(write, "save_file", full)
    with pytest.raises((failure, BytescaleError)) as caught:
        written(tmp_path / "a", {}, entries(4, 4), 16)
    assert not list(tmp_path.iterdir())
    if failure is SafetensorError:
        assert isinstance(caught.value, StorageError)
        assert caught.value.code == 74
        assert "No space left" in str(caught.value)


@pytest.mark.long
def test_a_kill_leaves_only_a_draft_that_cannot_be_loaded(tmp_path: Path) -> None:
    """Not even when all tensors are on disk: config.json is written last."""
    code = f"""
import os, signal
from pathlib import Path
from engine.weights import write
write._write_json = lambda path, value: os.kill(os.getpid(), signal.SIGKILL)
import torch
with write.new_folder(Path({str(tmp_path / "a")!r})) as draft:
    write.write_weights(draft, {{}}, [write.Entry("t", 4, lambda: torch.zeros(1))], 8)
"""
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": ":".join(sys.path)})
    assert done.returncode == -signal.SIGKILL
    (around,) = tmp_path.iterdir()
    assert around.name.startswith(".writing-a.")
    draft = around / "a"
    assert (draft / SINGLE).exists()
    with pytest.raises(DataError, match=r"has no config\.json"):
        read_config(draft)
    written(tmp_path / "a", {}, entries(1, 2), 4)
    assert [path.name for path in tmp_path.iterdir()] == ["a"], "the next writer removes the draft"
    names = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX, "config.json"}
    assert {path.name for path in (tmp_path / "a").iterdir()} == names, "and leaves nothing of it"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_stop_signals_leave_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """SIGTERM, a closed terminal and Ctrl-C clean up; their handlers are restored afterwards."""
    # A shell's background job ignores the one, what nohup started the other, and so do their children.
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "a") as draft:
        (draft / SINGLE).write_bytes(b"half")
        os.kill(os.getpid(), number)
        time.sleep(5)
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(number) == before


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    """The second one is refused and removes nothing from the first."""
    with new_folder(tmp_path / "a") as draft:
        (draft / "x").write_text("x")
        with pytest.raises(ConfigError, match="another process is writing"), new_folder(tmp_path / "a"):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["x"]


def test_files_that_others_put_there_meanwhile_are_kept(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="already exists"), new_folder(tmp_path / "a"):
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "precious").write_text("")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a" / "precious").exists()


def test_parent_folders_are_created(tmp_path: Path) -> None:
    with new_folder(tmp_path / "b" / "c") as draft:
        (draft / "x").write_text("x")
    assert (tmp_path / "b" / "c" / "x").read_text() == "x"
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["c"]
