"""Run folders of each released format are resumed, shown, exported and traced by this version (README.md)."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import Field

from bytescale_cli.main import run
from engine.config import keys, own, schema, validate, versions
from engine.config.load import load, read_resolved, resolved_yaml
from engine.config.resolved import flat
from engine.config.versions import Change
from engine.data import parts
from engine.errors import CheckpointError, ExitCode
from engine.launch.run import train
from engine.run.checkpoints import newest_first, read_state
from engine.run.compatibility import check_compatible
from engine.run.folder import RunFolder
from engine.run.metrics import read_metrics
from tests.refusals import refused
from tests.runs.make import RUNS, SAVED, STEPS, WRITTEN, texts
from tests.trainer.worlds import in_worlds

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
FORMATS = sorted(int(path.name) for path in HERE.iterdir() if path.name.isdecimal())
CUT = "slurm"  # a resolved.yaml that ends before this section
# A processor of another kind adds in another order.
SAME = {"rel": 1e-6}
# Blocks of texts that are packed again: commit 766c309 changed which documents rows are, and the names of all blocks.
PACKED_AGAIN = {1: 1}


@pytest.fixture(params=FORMATS)
def number(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """A format. Copies of its folders are in the working directory, since their paths are relative."""
    shutil.copytree(HERE / str(request.param), tmp_path, dirs_exist_ok=True)
    os.utime(tmp_path / "texts.jsonl", (WRITTEN, WRITTEN))
    monkeypatch.chdir(tmp_path)
    return int(request.param)


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Run a command that succeeds, and return its JSON."""
    capsys.readouterr()
    assert run([*words, "--json"]) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.world
@pytest.mark.parametrize("name", RUNS)
def test_training_resumes_with_equal_losses(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the checkpoint of step 10, in the run's own folder, with the same ranks: step by step the same."""
    before, packed = read_metrics(RunFolder(Path(name)).metrics), list[object]()
    write = parts._write_block
    monkeypatch.setattr(parts, "_write_block", lambda *given: (packed.append(given), write(*given)))
    in_worlds(monkeypatch, SAVED + 3)
    train(load([f"recipe={name}/resolved.yaml"]), say=lambda line: None)
    after = read_metrics(RunFolder(Path(name)).metrics)
    assert [line["step"] for line in after] == list(range(1, SAVED + 4))
    for was, now in zip(before, after, strict=False):
        for key in ("loss", "grad_norm", "lr"):
            assert now[key] == pytest.approx(was[key], **SAME), (now["step"], key)
        assert now["tokens"] == was["tokens"]
    assert len(packed) <= (PACKED_AGAIN.get(number, 0) if name == "dense" else 0)
    assert newest_first(Path(name, "checkpoints"))[0].name == f"step-{SAVED + 3:08d}"


@pytest.mark.parametrize("name", RUNS)
def test_commands_read_them(name: str, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    printed = Path(f"{name}.txt").read_text(encoding="utf-8").splitlines()
    losses = {line["step"]: line["loss"] for line in read_metrics(RunFolder(Path(name)).metrics)}
    assert [f"loss {losses[step]:.3f}" for step in range(1, STEPS + 1)] == [line.split("  ")[1] for line in printed]

    assert run(["report", name, "--out", "page.html"]) == 0
    assert f"{losses[STEPS]:.3f}" in Path("page.html").read_text(encoding="utf-8")

    (one,) = answer(capsys, "ckpt", "list", name)["checkpoints"]
    assert (one["step"], one["damaged"]) == (SAVED, None)
    (one,) = answer(capsys, "ckpt", "verify", name)["checkpoints"]
    assert one["damaged"] is None

    answer(capsys, "ckpt", "export", name, "--out", "exported")
    architecture = json.loads(Path("exported/config.json").read_text())["architectures"]
    assert architecture == ["MixtralForCausalLM" if name == "experts" else "LlamaForCausalLM"]
    words = ("--prompt", "the ", "--tokens", "4", "--tokenizer", "bytes")
    said = [answer(capsys, "generate", source, *words)["generate"] for source in (name, "exported")]
    assert said[0]["tokens"] == said[1]["tokens"]

    traced = answer(capsys, "data", "trace", name, "--step", "7")["trace"]
    assert traced["tokens"] == read_metrics(RunFolder(Path(name)).metrics)[6]["tokens"]
    assert all(row["place"] and row["problem"] is None for row in traced["sequences"])
    document = answer(capsys, "data", "trace", name, "--document", traced["sequences"][0]["id"])
    assert 7 in {row["step"] for row in document["trace"]["sequences"]}


def test_runs_are_listed_and_compared(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    listed = answer(capsys, "runs", "list", ".")["runs"]
    assert {one["run"]: (one["state"], one["step"]) for one in listed} == dict.fromkeys(RUNS, ("finished", STEPS))
    compared = answer(capsys, "runs", "compare", *RUNS)["compare"]["runs"]
    assert [one["step"] for one in compared] == [STEPS, STEPS]


def test_every_key_that_a_format_lacks_has_a_row(number: int) -> None:
    """In the table of a later format. A key without a row is one by which these folders cannot be read any more."""
    for name in RUNS:
        saved = yaml.safe_load(Path(name, "resolved.yaml").read_text(encoding="utf-8"))
        assert saved.pop("format", 1) == number
        saved["data"] |= {"sources": None, "mix": None}
        changes = [change for later, change in versions.CHANGES.items() if later > number]
        added = {key for change in changes for key in change.added}
        gone = {key for change in changes for key in change.gone}
        assert {*flat(saved)} - gone | (added - gone) == {*keys.leaves()}, "see engine/config/versions.py"


class _Model(schema.Model):
    of_a_test: bool = Field(description="a key that came later")


class _Config(schema.Config):
    model: _Model


@pytest.mark.parametrize("name", RUNS)
def test_they_outlive_a_new_key(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (keys, own, validate):
        monkeypatch.setattr(module, "Config", _Config)
    change = Change(added={"model.of_a_test": lambda older: older["model.experts"] > 1})
    monkeypatch.setattr(versions, "CHANGES", versions.CHANGES | {99: change})

    folder = RunFolder(Path(name))
    config = read_resolved(folder.resolved)
    assert config.model.model_dump()["of_a_test"] is (name == "experts")
    Path("saved.yaml").write_text(resolved_yaml(config), encoding="utf-8")
    assert read_resolved(Path("saved.yaml")) == config

    checkpoint = newest_first(folder.checkpoints)[0]
    check_compatible(checkpoint, read_state(checkpoint), config)
    other = config.model_copy(update={"model": config.model.model_copy(update={"of_a_test": name != "experts"})})
    with refused(CheckpointError, ".../checkpoints/step-00000010") as problems:
        check_compatible(checkpoint, read_state(checkpoint), other)
    assert "model.of_a_test" in problems[0].message

    done = train(load([f"recipe={name}/resolved.yaml"]), dry_run=True, say=lambda line: None)
    assert (done["dry_run"]["steps_done"], done["dry_run"]["checkpoint"]) == (SAVED, str(checkpoint))


def refuse(capsys: pytest.CaptureFixture[str], command: str) -> tuple[int, dict[str, Any]]:
    """Run a command that fails, and return its exit code and the one error of its JSON."""
    capsys.readouterr()
    code = run([*command.split(), "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    error: dict[str, Any] = found["error"]
    return code, error


@pytest.mark.parametrize("written", [99, 0, -1, "two", CUT])
def test_a_damaged_config_and_one_of_a_newer_format_or_one_that_never_was_is_one_sentence(
    written: object, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    resolved = Path("dense/resolved.yaml")
    values = {"format": written, "new_key": 1, **yaml.safe_load(resolved.read_text(encoding="utf-8"))}
    text = yaml.safe_dump(values, sort_keys=False)
    if written == CUT:
        text = text[text.index("recipe") : text.rindex("slurm:")]
    resolved.write_text(text, encoding="utf-8")
    before = {path: path.read_bytes() for path in Path("dense").rglob("*") if path.is_file()}
    for command in (
        "train run.out=dense data=jsonl data.path=texts.jsonl data.cache=cache",
        "train --config dense/resolved.yaml",
        "report dense",
        "ckpt export dense --out exported",
        "data trace dense --step 7",
        "runs compare dense experts",
        "generate dense --prompt the",
    ):
        code, error = refuse(capsys, command)
        assert code == ExitCode.USAGE, command
        assert "dense/resolved.yaml" in error["key"] and str(written) in error["message"] and error["hint"], command
        assert "ByteScale" in error["hint"] or written != 99, command
    (row,) = answer(capsys, "runs", "list", ".")["unreadable"]
    assert row["run"] == "dense" and str(written) in row["reason"]
    for command in ("ckpt list dense", "ckpt verify dense"):  # these read no config
        answer(capsys, *command.split())
    assert before.items() <= {path: path.read_bytes() for path in Path("dense").rglob("*") if path.is_file()}.items()


def test_the_texts_are_those_of_the_script() -> None:
    """So that a folder that is made again differs by its format alone."""
    for number in FORMATS:
        assert (HERE / str(number) / "texts.jsonl").read_text(encoding="utf-8") == texts()
