"""The commands of docs/tasks/ work, in their order, as they are printed there.

Files of the reader have small stand-ins, and so have the recipes that the reader's own ones build on: a model of two
layers on two CPU processes. Commands for a cluster meet a stand-in for sbatch, and `doctor` one for the machine.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from bytescale_cli.main import run
from engine.config.load import load
from engine.doctor import examine
from tests.bytescale_cli.checks import all_states
from tests.root import ROOT
from tests.trainer.continued import CHATS, TEXTS, model_folder
from tests.trainer.worlds import in_worlds

DOCS = ROOT / "docs"
PAGES = sorted((DOCS / "tasks").glob("*.md"))
SMALL = """
defaults:
  - quickstart
  - override /data: jsonl
context: 512
capacity: 256
batch_tokens: 1K
data: {{field: {field}, exhausted: repeat, validation_share: 0.2, validation_tokens: 128}}
run: {{steps: 2, validate_every: 2, checkpoint_every: 2}}
optimizer: {{warmup_steps: 1}}
"""
BASES = {"llama3-8b-64k-1node": "text", "llama3-8b-sft-32k-1node": "messages"}
QUICKER = {"--seconds 40": "--seconds 1"}


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in a language; "" are command lines."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def commands(page: Path) -> list[str]:
    """The command lines of a page, without their comments."""
    lines = [line.split("  #")[0].strip() for text in blocks(page, "") for line in text.splitlines()]
    assert all(line.startswith("bytescale ") for line in lines), "a test runs all that is in a block"
    return lines


def recipes(page: Path) -> Iterator[tuple[str, str]]:
    """Name and text of each recipe that a page tells its reader to write."""
    for text in blocks(page, "yaml"):
        yield ("sft.yaml" if "sft" in text else "mine.yaml"), text


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the reader's documents, models and recipes."""
    home = tmp_path_factory.mktemp("home")
    (home / "corpus").mkdir()
    for name, rows in (("mine.jsonl", TEXTS), ("corpus/a.jsonl", TEXTS * 3), ("chats.jsonl", CHATS * 3)):
        lines = [json.dumps(row).replace("?", f"? {at}").replace("def", f"def{at}") for at, row in enumerate(rows)]
        (home / name).write_text("\n".join(lines))
    (home / "my-lengths.txt").write_text("100\n20000\n3000\n")
    for name in ("llama3-8b", "llama3-8b-instruct"):
        model_folder("llama", home / "models" / name)
    for base, field in BASES.items():
        (home / f"{base}.yaml").write_text(SMALL.format(field=field))
    for page in PAGES:
        for name, text in recipes(page):
            (home / name).write_text(re.sub(r"- (llama3\S+)", r"- ./\1.yaml", text))
    (home / "bin").mkdir()
    (home / "bin" / "sbatch").write_text("#!/bin/sh\ncat > submitted.sh\necho 7\n")
    (home / "bin" / "sbatch").chmod(0o755)
    return home


@pytest.fixture
def at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setenv("PATH", f"{home / 'bin'}:", prepend=":")
    monkeypatch.setattr(examine, "examine", lambda job, say: all_states())
    in_worlds(monkeypatch, last=99)


def use(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run a command as a page prints it, but for what takes long."""
    for long, short in QUICKER.items():
        command = command.replace(long, short)
    code = run(shlex.split(command)[1:])
    assert code == 0, f"{command}: {capsys.readouterr()}"


@pytest.mark.world
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_all_commands_of_a_page_succeed(page: Path, at_home: None, capsys: pytest.CaptureFixture[str]) -> None:
    found = commands(page)
    assert len(found) >= 6
    if page.stem in ("slurm", "slow-or-failed"):
        for name in ("mine", "other"):
            if not Path("runs", name).exists():
                use(f"bytescale train --config mine.yaml run.weights=models/llama3-8b run.out=runs/{name}", capsys)
    for command in found:
        use(command, capsys)
        if "--launcher slurm" in command and "--dry-run" not in command:
            assert "run.out=runs/job" in Path("submitted.sh").read_text()
            shutil.copytree("runs/mine", "runs/job", dirs_exist_ok=True)  # as the job would do


def test_the_recipes_of_the_pages_are_valid_as_they_are(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    for page in PAGES:
        for name, text in recipes(page):
            Path("as-printed.yaml").write_text(text)
            assert load(["recipe=./as-printed.yaml"], rules=False).run.out == f"runs/{name.removesuffix('.yaml')}"


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_index_has_every_page() -> None:
    index = (DOCS / "index.md").read_text()
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"index.md"}
    assert {page for page in pages if f"({page})" not in index} == set()
