"""What a terminal of 80 columns shows: every number whole, and no line that the terminal would break itself."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescale_cli import output, terminal
from bytescale_cli.main import run
from engine.doctor import examine
from engine.hardware import profile as profiling
from engine.hardware.fit import calibrate, points
from engine.hardware.profile import Profile
from tests.bytescale_cli.checks import all_states
from tests.bytescale_cli.commands import commands
from tests.bytescale_cli.screen import open_terminal, read_all, shown
from tests.data.past_run import run_of
from tests.hardware.machines import config, measured
from tests.root import ROOT
from tests.run.damage import save

pytestmark = pytest.mark.long

SMALL = [
    "lengths=github",
    "lengths.max=8K",
    "batch_tokens=32K",
    "context=8K",
    "capacity=2K",
    "cluster.ranks_per_node=4",
]
BIG = ["recipe=llama7b-256k", "lengths=byted", "cluster.nodes=4", "batch_tokens=8M"]
TINY = ["batch_tokens=8K", "--planners", "static", "--no-tuned"]
# The module of each table, and commands that show it.
TABLES = {
    "ckpt": ["ckpt list {run}", "ckpt verify {run}", "ckpt verify {intact}"],
    "config": [
        "config show --origin recipe=llama7b-2m",
        "config show --origin --config {folder}/mine.yaml",
        "config help",
        "config help model",
        "config help recipe",
        "config help data",
    ],
    "data_plan": ["data plan {documents}", "data plan {sources}"],
    "data_trace": ["data trace {run} --step 1"],
    "data_watch": ["data watch {run} --once"],
    "doctor": ["doctor run.out={folder}/new"],
    "estimate_memory": ["estimate-memory recipe=llama70b-2m-paper --fit --table"],
    "plan": ["plan {small} --steps 3", "plan {big}"],
    "profile_data": ["profile-data {small}", "profile-data {big}", "data lint {documents}", "profile-data {sources}"],
    "profile_hardware": ["profile-hardware --out {folder}/calibration.json"],
    "recipes": ["recipes list", "recipes list {folder}"],
    "runs": ["runs list {folder}", "runs compare {run} {other}"],
    "simulate": [
        "simulate {big} --no-tuned",
        "simulate {small} batch_tokens=8K --planners static",
        "simulate {small} {tiny} --sweep capacity=2K,4K --sweep offload.ratio=0,1",
        "simulate {small} {tiny} --sweep cluster.ranks_per_node=4,8 --sweep lengths=github,byted",
    ],
    "train": ["train --dry-run {documents} run.out={folder}/new"],
    "tune": ["tune {small} parallel.pp=1 recompute=none offload.ratio=0"],
}
# Lists, records and sentences that are not tables.
OTHERS = [
    "ckpt inspect {intact}",
    "ckpt prune {intact} --keep 1 --dry-run",
    "runs status {run}",
    "runs logs {run}",
    "data head {documents} --step 1",
    "config help optimizer.lr",
    "estimate-memory",
    "plan",
]
# Of these a terminal shows what a file would have: paths, and texts that programs read or models write.
AS_THEY_ARE = {
    "chaos",
    "ckpt export",
    "ckpt import",
    "completion",
    "config schema",
    "config show",
    "data pack",
    "generate",
    "recipes copy",
    "recipes show",
    "report",
}
CODES = {"ckpt verify {run}": 5}


class Stream(io.StringIO):
    """A terminal that has no file descriptor."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A run of two steps with a damaged checkpoint, its documents, and a recipe, in a folder with a long name."""
    folder = tmp_path_factory.mktemp("a-folder-with-a-long-name-that-takes-most-of-eighty-columns")
    (folder / "mine.yaml").write_text(
        "# A recipe of my own, about which there is more to say than one line has room for.\n"
        "defaults: quickstart\nrun:\n  seed: 5\n"
    )
    (folder / "a.jsonl").write_text('{"text": "hello"}\n\n{"text": "world, again"}\n')
    given = f"data=jsonl data.path={folder / 'a.jsonl'} data.validation_share=0"
    sizes = ["context=8", "capacity=8", "batch_tokens=16", "cluster.ranks_per_node=2"]
    root = run_of(folder, *given.split(), *sizes, steps=2)[0].root
    (root / "checkpoints" / "step-00000002").mkdir(parents=True)
    sources = " ".join(f"data.sources.{name}.path={folder / 'a.jsonl'}" for name in ("web", "code"))
    return {
        "run": str(root),
        "intact": str(save(folder / "intact" / "checkpoints", 2).parents[1]),
        "other": str(shutil.copytree(root, folder / "another-run")),
        "folder": str(folder),
        "documents": given,
        "sources": f"data=jsonl {sources} data.mix={{web:3,code:1}} data.validation_share=0",
        "small": " ".join(SMALL),
        "big": " ".join(BIG),
        "tiny": " ".join(TINY),
    }


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks stand still, so that a command shows the same times again, and no hardware is measured."""
    ours = measured()
    calibration = calibrate(ours, config())
    found = Profile(calibration, ours, config(), points(ours, calibration, config()), launch_bound=())
    monkeypatch.setattr(profiling, "profile", lambda config, gpus, say: found)
    monkeypatch.setattr(examine, "examine", lambda job, say: all_states())
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)


def test_every_table_is_tested() -> None:
    files = (ROOT / "bytescale_cli").glob("*.py")
    made = {file.stem for file in files if re.search(r"output\.(table|sections)\(", file.read_text(encoding="utf-8"))}
    assert made == set(TABLES)


def test_every_command_is_tested() -> None:
    lines = [*OTHERS, *(line for lines in TABLES.values() for line in lines)]
    shown_here = {name for name in commands() if any(f"{line} ".startswith(f"{name} ") for line in lines)}
    assert set(commands()) - AS_THEY_ARE == shown_here - AS_THEY_ARE


@pytest.mark.parametrize("line", commands())
def test_help_is_whole_at_80_columns(line: str) -> None:
    text = shown([*line.split(), "--help"])
    assert "…" not in text and not re.search(r"\w\.\.\.", text)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("line", [*OTHERS, *(line for lines in TABLES.values() for line in lines)])
def test_a_table_is_whole_at_80_columns(line: str, places: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """No ellipsis, no line that is too long but for a path, and no number that differs from the output to a file."""
    words, code = line.format_map(places).split(), CODES.get(line, 0)
    text = shown(words, code=code)
    assert "…" not in text and not re.search(r"\w\.\.\.", text)
    too_long = [row for row in text.splitlines() if len(row) > 80]
    assert [row for row in too_long if "/" not in max(row.split(), key=len)] == []
    capsys.readouterr()
    assert run(words) == code
    captured = capsys.readouterr()
    missing = Counter((captured.out + captured.err).split()) - Counter(text.split())
    numbers = [word for word in missing if any(map(str.isdigit, word))]
    assert numbers == []


def test_the_width_is_that_of_the_terminal(places: dict[str, str]) -> None:
    """Without COLUMNS, in a process of its own."""
    ours, theirs = open_terminal(60)
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"TERM": "xterm"}
    command = [sys.executable, "-m", "bytescale_cli", "recipes", "list"]
    process = subprocess.Popen(command, stdout=theirs, cwd=ROOT, env=environment)
    os.close(theirs)
    rows = read_all(ours).splitlines()
    assert process.wait() == 0 and 50 < max(len(row) for row in rows[1:]) <= 60
    assert rows[0].startswith("\x1b[1mrecipe ")


CELLS = st.text(st.sampled_from("ab7, \u4e2d"), max_size=30)


@given(
    st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(CELLS, min_size=n, max_size=n), min_size=2, max_size=5)),
    st.booleans(),
    st.integers(10, 80),
)
def test_no_form_of_a_table_loses_or_cuts_a_word(cells: list[list[str]], right: bool, width: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", Stream())
        patch.setenv("COLUMNS", str(width))
        patch.setenv("TERM", "dumb")
        text = output.table(cells[0], cells[1:], right=right)
    words = Counter(word for row in cells[1:] for cell in row for word in cell.split())
    assert words - Counter(text.split()) == Counter()
    for line in text.split("\n"):
        if terminal.cells(line) > width:
            assert len(line.split()) == 1, "only a word that is wider than the terminal exceeds it"


def test_the_forms_of_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Stream())
    monkeypatch.setenv("TERM", "dumb")

    def rows(width: int, *cells: str, right: bool = False) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        names = ["name", "size", "about"][: len(cells)]
        return output.table(names, [cells], right=right).split("\n")

    about = "what it is and what it is for, in a sentence"
    assert rows(80, "a", "1", about) == ["name  size  about", f"a     1     {about}"]
    assert rows(40, "a", "1", about) == [
        "name  size  about",
        "a     1     what it is and what it is",
        "            for, in a sentence",
    ]
    assert rows(20, "a", "1", "/a/long/path/of/a/file") == [
        "name  size",
        "  about",
        "a     1",
        "  /a/long/path/of/a/file",
    ]
    assert rows(12, "a", "17,408", right=True) == ["name    size", "a     17,408"]
    assert rows(11, "a", "17,408", right=True) == ["name a", "  size", "    17,408"]


def test_commands_are_broken_such_that_a_shell_runs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    command = "printf '%s\\n' 'a b' 'a\\b' " + " ".join(f"word-{number}" for number in range(20))
    broken = terminal.pasteable(command, Stream())
    assert max(map(len, broken.split("\n"))) <= 30 and "\n" in broken
    said = [subprocess.run(["bash", "-c", text], capture_output=True, check=True).stdout for text in (command, broken)]
    assert said[0] == said[1]
    assert terminal.pasteable(command, io.StringIO()) == command


@pytest.mark.parametrize(
    ("environment", "styled"),
    [({"TERM": "xterm"}, True), ({"TERM": "dumb"}, False), ({"TERM": "xterm", "NO_COLOR": "1"}, False)],
)
def test_styles(environment: dict[str, str], styled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (terminal.painted("a", "bold", Stream()) == "\x1b[1ma\x1b[0m") == styled
    assert terminal.painted("a", "bold", io.StringIO()) == "a"
    assert terminal.is_live(Stream()) == (environment["TERM"] != "dumb")


def test_messages_are_broken_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for stream, said in (
        (Stream(), "\x1b[31merror:\x1b[0m one two three\n  four\n"),
        (io.StringIO(), "error: one two three four\n"),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        output.say("error: one two three four")
        assert stream.getvalue() == said
