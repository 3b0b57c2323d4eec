"""`ckpt` parses, calls and prints; the functions it calls have their own tests."""

from __future__ import annotations

import json
import shlex
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from bytescale_cli.main import run
from bytescale_cli.output import say
from engine.run.checkpoints import START_OVER
from engine.run.remote import Remote
from tests.bytescale_cli.failures import failed
from tests.data.past_run import run_of
from tests.run import damage
from tests.run.damage import flip, save, truncate
from tests.weights.folders import llama, saved

WRITTEN = {"out": "hf", "checkpoint": "r/checkpoints/step-1", "step": 1, "dtype": "bf16", "shards": 2, "bytes": 9000}
WRITTEN["left_out"] = ["layers.0.ffn.bias"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A stand-in for the exporter that records its calls."""
    noted: list[Any] = []

    def export_weights(*arguments: object) -> dict[str, Any]:
        noted.append(arguments)
        return WRITTEN

    fake = types.ModuleType("engine.trainer.export")
    fake.export_weights = export_weights  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "engine.trainer.export", fake)
    return noted


def test_export(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ckpt", "export", "r", "--out", "hf"]) == 0
    assert run(["ckpt", "export", "r", "--out", "hf", "--dtype", "fp32", "--shard-size", "1.5MB"]) == 0
    assert asked == [(Path("r"), Path("hf"), None, 5 << 30, say), (Path("r"), Path("hf"), "fp32", 3 << 19, say)]
    captured = capsys.readouterr()
    assert captured.out == "hf\nhf\n"
    assert captured.err.splitlines()[:2] == [
        "step 1, bf16, 9,000 bytes in 2 shards",
        "warning: Hugging Face's format cannot store layers.0.ffn.bias; the exported model produces different logits",
    ]


def test_a_list_marks_damaged_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        (tmp_path / "checkpoints" / f"step-0000000{step}").mkdir(parents=True)
    assert run(["ckpt", "list", str(tmp_path)]) == 0
    _, newest, oldest = capsys.readouterr().out.splitlines()
    assert newest.split()[:3] == ["2", "-", "0"] and newest.endswith("damaged: manifest.json is missing")
    assert oldest.split()[:3] == ["1", "-", "0"]
    assert run(["ckpt", "list", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [one["damaged"] for one in found] == ["manifest.json is missing"] * 2


@pytest.mark.parametrize("command", [["list"], ["verify"], ["inspect"], ["prune", "--keep", "1"]])
def test_a_run_without_a_checkpoint_says_so(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "resolved.yaml").touch()
    error = failed(capsys, ["ckpt", *command, str(tmp_path)], 5, tmp_path)["error"]
    assert error["message"] == "has no checkpoint yet" and "runs status" in error["hint"]


def test_verify_exits_with_5_if_a_checkpoint_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    older, newest = (save(tmp_path / "checkpoints", step) for step in (1, 2))
    assert run(["ckpt", "verify", str(tmp_path)]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:]] == ["intact", "intact"]
    flip(newest)
    assert run(["ckpt", "verify", str(older)]) == 0
    assert run(["ckpt", "verify", str(tmp_path)]) == 5
    assert "damaged: zero/a.pt does not match its hash" in capsys.readouterr().out
    told = failed(capsys, ["ckpt", "verify", str(tmp_path)], 5, tmp_path)
    assert [one["damaged"] for one in told["checkpoints"]] == ["zero/a.pt does not match its hash", None]
    assert START_OVER not in told["error"]["hint"]


def test_verify_of_no_intact_checkpoint_says_how_to_start_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(save(tmp_path / "checkpoints", 1))
    assert failed(capsys, ["ckpt", "verify", str(tmp_path)], 5, tmp_path)["error"]["hint"] == START_OVER
    newest = save(tmp_path / "checkpoints", 2)
    flip(newest)
    assert failed(capsys, ["ckpt", "verify", str(tmp_path)], 5, tmp_path)["error"]["hint"] == START_OVER
    failed(capsys, ["ckpt", "verify", f"{newest}/"], 5, f"{newest}/")


def test_inspect_of_a_file_of_another_size_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    truncate(save(tmp_path / "checkpoints", 7))
    assert run(["ckpt", "inspect", str(tmp_path)]) == 5
    captured = capsys.readouterr()
    assert "step: 7" in captured.out and "zero/b.pt" in captured.err


def test_inspect_shows_nested_values_by_their_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"model.rope": {"kind": "none", "factor": None}, "model.tied": False, "balance.bias_rate": None}
    monkeypatch.setattr(damage, "VALUES", values)
    save(tmp_path / "checkpoints", 7)
    assert run(["ckpt", "inspect", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[lines.index("must_match:") + 1 :][:3] == [
        "  model.rope.kind: none",
        "  model.tied: false",
        "skipped: 0",
    ]
    assert "  places.data: [0, 0, 49, 0]" in lines
    assert run(["ckpt", "inspect", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"]["must_match"] == values


def test_inspect_shows_state_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "checkpoints", 7)
    assert run(["ckpt", "inspect", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"step: 7", "ranks: 1", "  run.seed: 0", "  zero/a.pt: 3,000 bytes"} <= set(lines)
    assert run(["ckpt", "inspect", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["checkpoint"]
    assert found["files"] == {"zero/a.pt": 3000, "zero/b.pt": 10} and found["must_match"]["run.seed"] == 0


def test_prune(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in range(1, 6):
        save(tmp_path / "checkpoints", step)
    arguments = ["ckpt", "prune", str(tmp_path), "--keep", "1", "--every", "2"]
    gone = [str(tmp_path / "checkpoints" / f"step-0000000{step}") for step in (3, 1)]
    assert run([*arguments, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "ok": True, "removed": gone, "dry_run": True}
    assert run(arguments) == 0
    captured = capsys.readouterr()
    assert captured.out.split() == gone and captured.err.splitlines()[-1] == "removed 2 checkpoints"
    assert len(list((tmp_path / "checkpoints").iterdir())) == 3


def test_an_argument_has_the_name_that_the_help_shows(capsys: pytest.CaptureFixture[str]) -> None:
    failed(capsys, ["ckpt", "prune", "--keep", "1"], 2, "RUN")
    failed(capsys, ["ckpt", "list"], 2, "RUN|URL")


def test_export_in_json(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ckpt", "export", "r", "--out", "hf", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "ok": True, "export": WRITTEN}


def test_import_prints_overrides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved(llama(), tmp_path / "theirs")
    assert run(["ckpt", "import", str(folder), "--out", str(tmp_path / "a b")]) == 0
    captured = capsys.readouterr()
    words = shlex.split(captured.out)
    assert words[-1] == f"run.weights={tmp_path / 'a b'}"
    assert {"model.layers=2", "model.heads=4", "model.tied=false"} <= set(words)
    assert f"{tmp_path / 'a b'}: 21 tensors, 32,032 parameters, 1 shard" in captured.err.splitlines()
    assert {"model.rope_theta=10000.0", "model.rope.kind=none", "model.rope.factor=null"} <= set(words)
    assert run(["ckpt", "import", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["import"]["out"] == str(folder)


def test_copies_in_a_remote_folder_are_listed_and_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"file://{tmp_path}/remote"
    for step in (3, 6):
        Remote(url).upload(save(tmp_path, step))
    assert run(["ckpt", "list", url]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["6", "3"]
    assert run(["ckpt", "verify", url]) == 0
    capsys.readouterr()
    flip(tmp_path / "remote/step-00000006")
    assert run(["ckpt", "verify", url, "--json"]) == 5
    answer = json.loads(capsys.readouterr().out)
    assert answer["checkpoints"][0] == {
        "path": f"{url}/step-00000006",
        "damaged": "zero/a.pt does not match its hash",
    }
    assert run(["ckpt", "verify", f"{url}/step-00000003"]) == 0
    failed(capsys, ["ckpt", "list", f"{url}/nothing"], 5, f"{url}/nothing")


def test_verify_of_a_run_checks_its_ledger_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("text")
    data = ["data=folder", f"data.path={tmp_path}", "data.pattern='*.txt'", "data.validation_share=0"]
    folder, _ = run_of(tmp_path, *data, "context=16", "capacity=16", "batch_tokens=16", steps=2)
    save(folder.checkpoints, 2)
    assert run(["ckpt", "verify", str(folder.root)]) == 0
    assert capsys.readouterr().out.splitlines()[2].split() == [str(folder.ledger), "intact"]
    rows = folder.ledger / "documents-00000000.bin"
    content = rows.read_bytes()
    rows.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert run(["ckpt", "verify", str(folder.root), "--json"]) == 4
    told = json.loads(capsys.readouterr().out)
    assert told["ledger"] == ["documents-00000000.bin: step 2 does not match its hash"]
    assert (told["error"]["code"], told["error"]["key"]) == (4, str(folder.ledger))
    assert [one["damaged"] for one in told["checkpoints"]] == [None]
