"""Checkpoints in a remote folder are complete or invisible, and damaged ones are not used."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from engine.errors import CheckpointError, ConfigError, PreflightError
from engine.folders import remove_ruins
from engine.run.checkpoints import FILES, MANIFEST, TrainState, newest_first, read
from engine.run.remote import Remote, fetch, reaching
from engine.run.saved import check_all, listed
from tests.refusals import refused
from tests.run.damage import named, save, state

MEMORY = fsspec.filesystem("memory")


@pytest.fixture(params=["memory://bucket/run", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    yield f"file://{tmp_path}/remote" if request.param == "file" else request.param
    MEMORY.store.clear()
    MEMORY.pseudo_dirs[:] = [""]


def put(path: str, content: bytes) -> None:
    fsspec.core.url_to_fs(path)[0].pipe_file(path, content)


def get(path: str) -> bytes:
    return bytes(fsspec.core.url_to_fs(path)[0].cat_file(path))


def accept(state: TrainState) -> None:
    pass


def uploaded(root: Path, url: str, *steps: int) -> Remote:
    remote = Remote(url)
    for step in steps:
        remote.upload(save(root / "here", step))
    return remote


def test_a_checkpoint_comes_back_to_the_last_bit(tmp_path: Path, url: str) -> None:
    remote = uploaded(tmp_path, url, 5, 100)
    assert remote.newest_first() == ["step-00000100", "step-00000005"]
    assert Remote(f"{url}/step-00000005/").newest_first() == ["step-00000005"]
    said, states = list[str](), list[TrainState]()
    back = fetch(Remote(f"{url}/"), tmp_path / "back", states.append, said.append)
    assert read(back) == state(100) and states == [state(100)]
    assert said == [f"copying {url}/step-00000100 to {tmp_path / 'back'}"]
    for path in back.rglob("*.*"):
        assert path.read_bytes() == (tmp_path / "here" / path.relative_to(back.parent)).read_bytes()
    assert list((tmp_path / "back").iterdir()) == [back]
    older = fetch(Remote(f"{url}/step-00000005"), tmp_path / "back", accept, said.append)
    assert read(older) == state(5)
    said.clear()
    assert fetch(remote, tmp_path / "back", accept, said.append) == back
    assert said == [], "what is there is not copied again"


def test_a_folder_named_by_digits_is_no_checkpoint(tmp_path: Path, url: str) -> None:
    """A run may be named by its date. Its parent folder is that of other runs, and is neither read nor written."""
    remote = uploaded(tmp_path, f"{url}/20261123", 7)
    assert (remote.url, remote.newest_first()) == (f"{url}/20261123", ["step-00000007"])
    put(f"{url}/20261123/{MANIFEST}", b"{}\n")
    assert Remote(url).newest_first() == []


def test_a_checkpoint_is_invisible_until_its_last_file_is_copied(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that ends at any moment must not be taken for a checkpoint."""
    remote, folder, done = Remote(url), save(tmp_path / "here", 3), list[str]()
    put_file = remote._system.put_file

    def fails(local: str, place: str) -> None:
        if place.endswith("b.pt"):
            raise ConnectionError("gone")
        put_file(local, place)
        done.append(local)

    with monkeypatch.context() as patch:
        patch.setattr(remote._system, "put_file", fails, raising=False)
        with pytest.raises(ConnectionError):
            remote.upload(folder)
    assert len(done) == 1 and remote.newest_first() == []
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        remote.listed()
    remote.upload(folder)
    assert remote.newest_first() == [folder.name]
    remote.check(folder.name)


def test_a_checkpoint_with_another_manifest_is_replaced_and_an_equal_one_is_not_copied_again(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = uploaded(tmp_path, url, 3)
    with monkeypatch.context() as patch:
        patch.setattr(remote._system, "put_file", lambda *given: pytest.fail("copied again"), raising=False)
        remote.upload(tmp_path / "here/step-00000003")
    put(f"{url}/step-00000003/{MANIFEST}", b"{}\n")
    remote.upload(tmp_path / "here/step-00000003")
    remote.check("step-00000003")


DAMAGES: dict[str, Callable[[str], None]] = {
    "zero/a.pt does not match its hash": lambda one: put(f"{one}/zero/a.pt", b"b" + get(f"{one}/zero/a.pt")[1:]),
    "zero/b.pt": lambda one: put(f"{one}/zero/b.pt", get(f"{one}/zero/b.pt") + b"x"),
    "zero/b.pt ": lambda one: put(f"{one}/zero/b.pt", b""),
    "manifest.json does not match its hash": lambda one: put(
        f"{one}/{MANIFEST}", get(f"{one}/{MANIFEST}").replace(b'"step": 100', b'"step": 101')
    ),
    "manifest.json is cut short": lambda one: put(f"{one}/{MANIFEST}", get(f"{one}/{MANIFEST}").split(b"\n")[0]),
}


@pytest.mark.parametrize("reason", DAMAGES)
def test_damage_is_found_on_the_way_back_and_the_next_one_is_used(tmp_path: Path, url: str, reason: str) -> None:
    remote, said = uploaded(tmp_path, url, 5, 100), list[str]()
    DAMAGES[reason](f"{url}/step-00000100")
    back = fetch(remote, tmp_path / "back", accept, said.append)
    assert read(back) == state(5) and list((tmp_path / "back").iterdir()) == [back]
    assert said[-1].startswith("warning: step-00000100 is damaged (") and said[-1].endswith(
        "using step-00000005 instead"
    )
    assert reason.strip() in said[-1]
    assert [one["damaged"] is None for one in check_all(url)] == [False, True]
    with refused(CheckpointError) as problems:
        fetch(Remote(f"{url}/step-00000100"), tmp_path / "back", accept, said.append)
    assert "00000100" in problems[0].message


def test_a_missing_file_is_damage(tmp_path: Path, url: str) -> None:
    remote = uploaded(tmp_path, url, 5)
    remote._system.rm_file(remote._path("step-00000005", "zero/a.pt"))
    assert check_all(url) == [{"path": f"{url}/step-00000005", "damaged": "zero/a.pt is missing"}]
    with refused(CheckpointError) as problems:
        fetch(remote, tmp_path / "back", accept, print)
    assert "zero/a.pt" in problems[0].message and "00000005" in problems[0].message
    assert list((tmp_path / "back").iterdir()) == []


def test_a_manifest_cannot_name_files_outside_of_its_checkpoint(tmp_path: Path, url: str) -> None:
    """Else a folder that others can write to could overwrite any file of the user."""
    uploaded(tmp_path, url, 5)
    files, manifest = (f"{url}/step-00000005/{name}" for name in (FILES, MANIFEST))
    before = get(files), get(manifest)
    for name in ("../../escaped", "/tmp/escaped"):
        for place, content in zip((files, manifest), named(*before, name), strict=True):
            put(place, content)
        with pytest.raises(CheckpointError, match=r"files\.jsonl names files outside of the checkpoint"):
            fetch(Remote(url), tmp_path / "a/b/back", accept, print)
    assert not list(tmp_path.rglob("escaped"))


def test_a_local_checkpoint_that_differs_is_set_aside(tmp_path: Path, url: str) -> None:
    remote, said = uploaded(tmp_path, url, 5), list[str]()
    local = save(tmp_path / "back", 5)
    (local / "zero/a.pt").write_bytes(b"short")
    assert fetch(remote, tmp_path / "back", accept, said.append) == local
    assert read(local) == state(5) and newest_first(tmp_path / "back") == [local]
    assert "step-00000005 differs from" in said[0] and "it is kept as abandoned-step-00000005-" in said[0]


def test_a_checkpoint_that_is_refused_is_not_copied(tmp_path: Path, url: str) -> None:
    def refuse(state: TrainState) -> None:
        raise CheckpointError("this config cannot resume from the checkpoint: dtype")

    remote = uploaded(tmp_path, url, 1, 5)
    with pytest.raises(CheckpointError, match="cannot resume"):
        fetch(remote, tmp_path / "back", refuse, print)
    assert not (tmp_path / "back").exists()


def test_going_back_hides_later_checkpoints_and_removes_nothing(tmp_path: Path, url: str) -> None:
    remote = uploaded(tmp_path, url, 1, 5, 9)
    assert remote.abandon(5) == ["step-00000009"]
    assert remote.newest_first() == ["step-00000005", "step-00000001"] and remote.abandon(5) == []
    assert get(f"{url}/step-00000009/abandoned-manifest.json")
    remote.upload(tmp_path / "here/step-00000009")
    assert remote.newest_first()[0] == "step-00000009"


def test_lists_show_what_those_of_a_local_run_show(tmp_path: Path, url: str) -> None:
    uploaded(tmp_path, url, 5, 100)
    put(f"{url}/step-00000100/{MANIFEST}", b"{")
    newest, older = listed(url)
    size = sum((tmp_path / "here/step-00000005/zero" / name).stat().st_size for name in ("a.pt", "b.pt"))
    assert older == {"path": f"{url}/step-00000005", "step": 5, "ranks": 1, "bytes": size, "damaged": None}
    assert newest["step"] == 100 and "manifest.json is unreadable" in newest["damaged"]


def test_an_interrupted_download_leaves_a_ruin_that_is_removed(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = uploaded(tmp_path, url, 5)

    def fails(*given: Any) -> None:
        raise ConnectionError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(remote._system, "get_file", fails, raising=False)
        with refused(PreflightError), reaching(remote):
            fetch(remote, tmp_path / "back", accept, print)
    assert newest_first(tmp_path / "back") == []
    remove_ruins(tmp_path / "back")
    assert list((tmp_path / "back").iterdir()) == []
    shutil.rmtree(tmp_path / "back")
    assert read(fetch(remote, tmp_path / "back", accept, print)) == state(5)


@pytest.mark.parametrize("wrong", ["bucket/run", "s3://", "s3://key:secret@bucket/run", "https://host/run?sig=abc"])
def test_a_url_with_a_secret_or_without_a_folder_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Remote(wrong)
    (problem,) = caught.value.problems
    assert problem.key == "run.remote" and "secret" not in str(problem) and "abc" not in str(problem)


def test_a_protocol_that_does_not_exist_is_named() -> None:
    with refused(ConfigError, "run.remote=nonsense://bucket/run") as problems:
        Remote("nonsense://bucket/run")
    (problem,) = problems
    assert problem.hint == "for example s3://bucket/run, gs://bucket/run or file:///mnt/run"
