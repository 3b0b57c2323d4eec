"""Where a run may write: its files never mix with documents or with files of other programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config.load import load, resolved_yaml
from engine.data.sources.folder import folder_files
from engine.errors import RunFolderError
from engine.launch.checks.place import check_place, files_of_a_run
from engine.launch.prepare import locked
from engine.run.folder import RunFolder
from tests.refusals import refused


def check(root: Path, data: Path, *more: str) -> None:
    check_place(RunFolder(root), load(["data=folder", f"data.path={data}", f"run.out={root}", *more]))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data" / "deep").mkdir(parents=True)
    (tmp_path / "data" / "a.txt").touch()
    return tmp_path / "data"


def test_a_new_folder_an_empty_one_and_its_own_are_accepted(tmp_path: Path, data: Path) -> None:
    """A run that stopped early, or was refused after its folder was created, has left only its own files."""
    root = tmp_path / "run"
    check(root, data)
    with locked(RunFolder(root)):
        check(root, data)
        RunFolder(root).log(0).touch()
    for name in (".resolved.yaml.123", ".DS_Store", "summary.json", "metrics.jsonl"):
        (root / name).touch()
    check(root, data)
    RunFolder(root).resolved.write_text(resolved_yaml(load([])))
    (root / "notes.txt").touch()
    check(root, data)  # a run's own folder may hold its owner's notes


def test_a_folder_of_another_program_is_refused(tmp_path: Path, data: Path) -> None:
    for name in ("b.txt", "a.txt", "checkpoints"):
        (tmp_path / "other" / name).mkdir(parents=True)
    with refused(RunFolderError, f"run.out={tmp_path}/other", code=73) as problems:
        check(tmp_path / "other", data)
    assert "a.txt and 1 more" in problems[0].message


@pytest.mark.parametrize("root", ["run/checkpoints/new", "run/checkpoints/step-00000002/new/deep", "link/new"])
def test_checkpoints_of_another_run_are_refused(tmp_path: Path, data: Path, root: str) -> None:
    """They would be damaged, and the new run removed with them."""
    run = RunFolder(tmp_path / "run")
    run.checkpoints.mkdir(parents=True)
    (tmp_path / "link").symlink_to(run.checkpoints)
    check(tmp_path / root, data)  # not of a run
    run.resolved.write_text(resolved_yaml(load([])))
    with refused(RunFolderError, f"run.out={tmp_path / root}") as problems:
        check(tmp_path / root, data)
    assert problems[0].message.endswith(f" {tmp_path}/run")
    check(tmp_path / "run" / "other", data)


@pytest.mark.parametrize("root", ["data", "data/../data", "link", "."])
def test_a_run_folder_may_not_contain_the_documents(tmp_path: Path, data: Path, root: str) -> None:
    (tmp_path / "link").symlink_to(data)
    (data / "resolved.yaml").touch()
    for lines in ([], [f"data.path={data / 'a.txt'}", "data.format=jsonl"]):
        with refused(RunFolderError, f"run.out={tmp_path / root}") as problems:
            check(tmp_path / root, data, *lines)
        assert "data.path=" in problems[0].message


@pytest.mark.parametrize(
    ("root", "pattern", "expected"),
    [
        ("run", "**/*", "resolved.yaml"),
        ("deep/run", "**/*.states", "checkpoints/step-00000001/zero/ranks-00000-00007.states"),
        ("deep/run", "**/*.py", None),
        ("run", "run/*.html", "report.html"),
        ("deep/run", "*", None),
        ("run", "**/*.txt", None),
    ],
)
def test_a_run_inside_the_documents_is_refused_if_its_files_match_the_pattern(
    data: Path, root: str, pattern: str, expected: str | None
) -> None:
    """The documents would change with every step, and the run could not be resumed."""
    if expected is None:
        check(data / root, data, f"data.pattern='{pattern}'")
        return
    with refused(RunFolderError, f"run.out={data / root}") as problems:
        check(data / root, data, f"data.pattern='{pattern}'")
    assert f" {expected} " in problems[0].message


def test_the_files_checked_are_those_that_would_become_documents(data: Path) -> None:
    for name in files_of_a_run(RunFolder(data / "run")):
        (data / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (data / "run" / name).touch()
    ((_, found),) = folder_files(load(["data=folder", f"data.path={data}", "data.pattern='run/**'"]).data)
    names = [
        name for name in files_of_a_run(RunFolder(data / "run")) if not name.startswith(".")
    ]  # hidden ones are left out
    assert set(found) == {f"run/{name}" for name in names}


def test_data_path_stdlib_is_not_a_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_place(RunFolder(Path("stdlib")), load(["run.out=stdlib"]))


@pytest.mark.parametrize(("path", "found"), [("data", True), ("data/**/*.jsonl", True), ("data/*.jsonl", False)])
def test_metrics_do_not_become_documents(tmp_path: Path, data: Path, path: str, found: bool) -> None:
    """data=jsonl takes every *.jsonl in a folder, and a run writes metrics.jsonl."""
    lines = ["data=jsonl", f"data.path={tmp_path / path}"]
    if not found:
        check(data / "run", data, *lines)
        return
    with refused(RunFolderError, f"run.out={data / 'run'}") as problems:
        check(data / "run", data, *lines)
    assert " metrics.jsonl " in problems[0].message


def test_documents_behind_a_url_are_nowhere_near(data: Path) -> None:
    check(data / "run", data, "data=jsonl", "data.path=memory://data/*.jsonl")


def test_the_documents_of_every_source_are_kept_apart(data: Path, tmp_path: Path) -> None:
    lines = ["data=jsonl", f"data.sources.near.path=[{tmp_path}/none,{data}]", "data.sources.far.path=memory://a"]
    config = load([*lines, "data.mix={near: 1, far: 1}"])
    check_place(RunFolder(tmp_path / "run"), config)
    with refused(RunFolderError, f"run.out={data / 'run'}") as problems:
        check_place(RunFolder(data / "run"), config)
    assert "data.sources.near.path=" in problems[0].message and " metrics.jsonl " in problems[0].message
