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


def test_verify_exits_with_5_if_a_checkpoint_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    older, newest = (save(tmp_path / "checkpoints", step) for step in (1, 2))
    assert run(["ckpt", "verify", str(tmp_path)]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:]] == ["intact", "intact"]
    flip(newest)
    assert run(["ckpt", "verify", str(older)]) == 0
    assert run(["ckpt", "verify", str(tmp_path)]) == 5
    captured = capsys.readouterr()
    assert "damaged: zero/a.pt does not match its hash" in captured.out
    assert "1 of 2 checkpoints is damaged: step-00000002: zero/a.pt does not match its hash" in captured.err
    assert "hint: `train` resumes from the newest intact one" in captured.err
    assert run(["ckpt", "verify", str(tmp_path), "--json"]) == 5
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["error"]["code"]) == (False, 5)
    assert [one["damaged"] for one in told["checkpoints"]] == ["zero/a.pt does not match its hash", None]


def test_verify_of_no_intact_checkpoint_says_how_to_start_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(save(tmp_path / "checkpoints", 1))
    assert run(["ckpt", "verify", str(tmp_path)]) == 5
    assert capsys.readouterr().err.splitlines() == [
        f"error: {tmp_path}: 1 of 1 checkpoint is damaged: step-00000001: zero/a.pt does not match its hash",
        f"hint: {START_OVER}",
    ]
    newest = save(tmp_path / "checkpoints", 2)
    flip(newest)
    assert run(["ckpt", "verify", str(tmp_path)]) == 5
    said = capsys.readouterr().err
    assert "2 of 2 checkpoints are damaged, such as step-00000002: zero/a.pt" in said and START_OVER in said
    assert run(["ckpt", "verify", f"{newest}/"]) == 5
    assert "`bytescale ckpt verify RUN` checks all checkpoints of its run" in capsys.readouterr().err


def test_inspect_of_a_file_of_another_size_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    truncate(save(tmp_path / "checkpoints", 7))
    assert run(["ckpt", "inspect", str(tmp_path)]) == 5
    captured = capsys.readouterr()
    assert "step: 7" in captured.out
    assert "checkpoint is damaged: zero/b.pt has 0 bytes instead of 10" in captured.err


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
    for more, said in (
        (["--keep", "0"], "--keep: must be at least 1, not 0"),
        (["--keep", "1", "--every", "-1"], "--every: must be at least 0, not -1"),
        (["--keep", "1", "--best", "-1"], "--best: must be at least 0, not -1"),
        (["--keep", "two"], "--keep: must be a whole number, not two"),
    ):
        assert run(["ckpt", "prune", str(tmp_path), *more]) == 2
        assert said in capsys.readouterr().err


def test_an_argument_has_the_name_that_the_help_shows(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["ckpt", "prune", "--keep", "1"], ["ckpt", "list"], ["runs", "compare"], ["chaos"]):
        assert run(words) == 2
        assert capsys.readouterr().err.startswith("error: RUN")


def test_export_in_json(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ckpt", "export", "r", "--out", "hf", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "ok": True, "export": WRITTEN}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--dtype", "fp16"], "--dtype: must be bf16 or fp32, not fp16"),
        (["--shard-size", "big"], "--shard-size: 'big' is not a size"),
    ],
)
def test_bad_flags(more: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ckpt", "export", "r", "--out", "hf", *more]) == 2
    assert expected in capsys.readouterr().err


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


def test_exit_codes_of_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ckpt", "import", str(tmp_path / "nowhere")]) == 4
    assert run(["ckpt", "export", str(tmp_path), "--out", str(tmp_path / "out")]) == 5
    assert run(["ckpt", "list", str(tmp_path)]) == 5
    assert len(capsys.readouterr().err.splitlines()) == 6, "cause and way out of each"


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
    assert run(["ckpt", "list", f"{url}/nothing"]) == 5
    assert "has no complete checkpoint" in capsys.readouterr().err


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
