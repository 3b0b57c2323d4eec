"""Each mistake of the catalogue has its exit code and its answer: place, cause and way out, in three lines at most."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import yaml

from bytescale_cli.main import run
from engine.config.load import load, resolved_yaml
from engine.files import LOCK, locked
from engine.launch import supervise
from engine.run import metrics
from engine.run.compatibility import must_match
from engine.run.folder import RunFolder
from tests import accepted
from tests.mistakes.catalogue import Answer, Mistake, accept, mistakes
from tests.run.damage import state, write_all

SECRET = "s3cret"  # in commands, for what no answer may show


def has(word: str, text: str) -> bool:
    """Return whether a text contains a word, or one of `a|b`, as a whole word."""
    return any(re.search(rf"(?<!\w){re.escape(one.lower())}(?!\w)", text.lower()) for one in word.split("|"))


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the quickstart after two steps, with a checkpoint whose tensors are missing."""
    folder = RunFolder(tmp_path_factory.mktemp("past") / "run")
    config = load(["recipe=quickstart"])
    write_all(folder.checkpoints, replace(state(2), must_match=must_match(config)))
    folder.resolved.write_text(resolved_yaml(config), encoding="utf-8")
    metrics.append(folder.metrics, {"step": 2})
    return folder.root


def test_each_has_a_name_of_its_own_and_no_promised_hint_is_in_the_command() -> None:
    names = [(one.area, one.name) for one in mistakes()]
    assert len(names) == len(set(names))
    for one in mistakes():
        assert not [word for word in one.hint if has(word, one.run)], one.name


CASES = [
    pytest.param(one, id=f"{one.area}-{one.name.replace(' ', '-')}", marks=[pytest.mark.long] if one.starts else [])
    for one in mistakes()
]


@pytest.mark.parametrize("mistake", CASES)
def test_mistakes(
    mistake: Mistake, past: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    for variable, value in mistake.environment.items():
        monkeypatch.setenv(variable, value)
    if not mistake.starts:
        monkeypatch.setattr(supervise, "run_ranks", unwanted)
    words = shlex.split(mistake.run.replace("{tmp}", str(tmp_path)))
    with prepared(mistake, past, tmp_path):
        before = files_in(tmp_path)
        capsys.readouterr()
        code = run(words if "--json" in words else [*words, "--json"])
    captured = capsys.readouterr()
    assert code == mistake.code, captured.err
    answers = answers_of(captured.out, tmp_path)
    said = captured.err[captured.err.find("error: ") :].splitlines()  # what a launcher says before is no answer
    text = " ".join(said)
    assert 1 <= len(said) <= 3 * len(answers)
    assert [word for word in (*mistake.names, *mistake.hint) if not has(word, text)] == []
    hints = [answer["hint"] for answer in answers if "hint" in answer]
    assert hints and not [hint for hint in hints if hint in mistake.run]
    typed = f"{mistake.run} {mistake.files}"
    assert [word for word in ("ydra", "nput should") if word in text and word not in typed] == []
    assert SECRET not in captured.out + captured.err
    assert mistake.starts or files_in(tmp_path) == before, "a command that is refused writes nothing"
    if accepted.REWRITE and answers != list(mistake.answers):
        accept(mistake, answers)
    else:
        assert answers == list(mistake.answers), "if the change is meant: pytest --accept"


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def answers_of(out: str, folder: Path) -> list[Answer]:
    """Return the mistakes that a command reports in its JSON object. Of paths the working directory is left out."""
    errors = json.loads(out.replace(str(folder), "{tmp}"))["errors"]
    return [{name: error[name] for name in ("key", "message", "hint") if error[name] is not None} for error in errors]


@contextmanager
def prepared(mistake: Mistake, past: Path, folder: Path) -> Iterator[None]:
    """Make the state that the `stage` of a mistake names, then write its files.

    - `run`: `run/` is a run of the quickstart after step 2, with one checkpoint;
    - `damaged`: the same, but its config lacks a key that its format has;
    - `newer`: the same, but its config has format 99;
    - `never`: the same, but its config has format 0;
    - `locked`: the same, and another launcher holds its lock;
    - `copied`: `mine.yaml` is a copy of the quickstart recipe with the line `contxt: 4096` at its end.
    """
    if mistake.stage == "copied":
        assert run(["recipes", "copy", "quickstart", "mine.yaml"]) == 0
        with (folder / "mine.yaml").open("a", encoding="utf-8") as file:
            file.write("contxt: 4096\n")
    elif mistake.stage:
        shutil.copytree(past, folder / "run")
        resolved = folder / "run" / "resolved.yaml"
        values = yaml.safe_load(resolved.read_text())
        if mistake.stage == "damaged":
            del values["run"]["restarts"]
        elif mistake.stage in ("newer", "never"):
            values["format"] = 99 if mistake.stage == "newer" else 0
        else:
            assert mistake.stage in ("run", "locked")
        resolved.write_text(yaml.safe_dump(values))
    for name, text in mistake.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            path.mkdir()
        else:
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with locked(folder / "run" / LOCK) if mistake.stage == "locked" else nullcontext():
        yield


def unwanted(*arguments: object) -> NoReturn:
    """Stands where ranks would be started."""
    raise AssertionError("the mistake was not noticed: ranks were started")
