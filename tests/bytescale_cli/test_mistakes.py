"""Each of the mistakes has an answer of three lines at most, the promised exit code, and the way out.

`pytest -s` prints how many do.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
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
from tests.bytescale_cli.mistakes import MISTAKES, Mistake
from tests.run.damage import state, write_all

NO_HOST = "host that is not there"  # the only one that starts processes


def has(word: str, text: str) -> bool:
    """Return whether a text contains a word, or one of `a|b`, as a whole word."""
    return any(re.search(rf"(?<!\w){re.escape(one.lower())}(?!\w)", text.lower()) for one in word.split("|"))


def test_no_hint_is_in_the_command_itself() -> None:
    assert len(MISTAKES) == len({one.name for one in MISTAKES}) == 62
    for one in MISTAKES:
        assert not [word for word in one.hint if has(word, one.command)], one.name


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the quickstart after two steps, with a checkpoint whose tensors are missing."""
    folder = RunFolder(tmp_path_factory.mktemp("past") / "run")
    config = load(["recipe=quickstart"])
    write_all(folder.checkpoints, replace(state(2), must_match=must_match(config)))
    folder.resolved.write_text(resolved_yaml(config), encoding="utf-8")
    metrics.append(folder.metrics, {"step": 2})
    return folder.root


@pytest.fixture(scope="module")
def right() -> Iterator[list[str]]:
    """Collects the names of the mistakes with a right answer."""
    names: list[str] = []
    yield names
    print(f"\n{len(names)} of {len(MISTAKES)} mistakes have the right answer")


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda one: one.name.replace(" ", "-"))
def test_mistakes(
    mistake: Mistake,
    past: Path,
    right: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    if mistake.name != NO_HOST:
        monkeypatch.setattr(supervise, "run_ranks", unwanted)
    for name, text in mistake.files.items():
        path = tmp_path / name
        path.mkdir() if name.endswith("/") else path.write_text(text, encoding="utf-8")
    if mistake.stage in ("run", "damaged", "newer", "locked"):
        shutil.copytree(past, tmp_path / "run")
    if mistake.stage in ("damaged", "newer"):
        resolved = tmp_path / "run" / "resolved.yaml"
        values = yaml.safe_load(resolved.read_text())
        if mistake.stage == "newer":
            values["format"] = 99
        else:
            del values["run"]["restarts"]
        resolved.write_text(yaml.safe_dump(values))
    if mistake.stage == "copied":
        assert run(["recipes", "copy", "quickstart", "mine.yaml"]) == 0
        with (tmp_path / "mine.yaml").open("a", encoding="utf-8") as file:
            file.write("contxt: 4096\n")
        capsys.readouterr()
    with locked(tmp_path / "run" / LOCK) if mistake.stage == "locked" else nullcontext():
        code = run(shlex.split(mistake.command))
    captured = capsys.readouterr()
    answer = captured.err[captured.err.find("error: ") :].splitlines()  # what a launcher says before is no answer
    text = " ".join(answer)
    faults = [] if code == mistake.code else [f"exit code {code}, not {mistake.code}"]
    if not 1 <= len(answer) <= 3 * mistake.count:
        faults.append(f"{len(answer)} lines")
    faults += [f"does not name {word}" for word in mistake.names if not has(word, text)]
    faults += [f"does not hint at {word}" for word in mistake.hint if not has(word, text)]
    assert not faults, "\n".join([mistake.command, *faults, captured.err, captured.out])
    right.append(mistake.name)


def unwanted(*arguments: object) -> NoReturn:
    """Stands where ranks would be started."""
    raise AssertionError("the mistake was not noticed: ranks were started")
