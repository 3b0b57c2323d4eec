"""No file of the cache becomes a document."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.config import schema
from engine.config.load import load
from engine.data.apart import check_cache
from engine.data.cache import cache_folder
from engine.data.overview import Corpora
from engine.data.parts import Tokens, pack_block
from engine.errors import ConfigError
from tests.data.noted import Noted
from tests.refusals import refused

MakeData = Callable[..., schema.Data]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "texts" / "deep").mkdir(parents=True)
    (tmp_path / "texts" / "a.txt").write_bytes(b"one")
    return tmp_path / "texts"


@pytest.mark.parametrize(
    ("cache", "path", "pattern"),
    [
        ("texts/cache", "texts", "**/*"),
        ("texts", "texts", "**/*.json"),
        ("texts/deep/cache", "texts", "deep/**/*.bin"),
        ("texts/cache", "texts", "cache/*/*"),
        ("texts/cache", "texts/**/*.idx", "**/*.jsonl"),
        ("texts/cache", "texts", "**/*.lock"),
        ("link/cache", "texts", "**/*"),
        ("texts/cache", "link", "**/*"),
    ],
)
def test_a_cache_among_the_documents_is_refused(
    texts: Path, tmp_path: Path, make_data: MakeData, cache: str, path: str, pattern: str
) -> None:
    (tmp_path / "link").symlink_to("texts")
    data = make_data(tmp_path / path, pattern=pattern, cache=str(tmp_path / cache))
    with pytest.raises(ConfigError, match=r"is inside data\.path=\S*, so 00/\S+ would become a document") as caught:
        check_cache(data)
    (problem,) = caught.value.problems
    assert problem.key == f"data.cache={tmp_path / cache}" and "data.cache=DIR" in str(problem.hint)


@pytest.mark.parametrize(
    ("cache", "path", "pattern"),
    [
        ("cache", "texts", "**/*"),
        ("texts/cache", "texts", "**/*.txt"),
        ("texts/cache", "texts", "*"),
        ("texts/cache", "texts/deep", "**/*"),
        ("texts/cache", "texts/a.txt", "**/*"),
        (".", "texts", "**/*"),
        ("texts/cache", "memory://texts", "**/*"),
        ("texts/cache", "stdlib", "**/*"),
    ],
)
def test_a_cache_apart_from_the_documents_is_accepted(
    texts: Path, tmp_path: Path, make_data: MakeData, cache: str, path: str, pattern: str
) -> None:
    named = path if "://" in path or path == "stdlib" else str(tmp_path / path)
    check_cache(make_data(named, pattern=pattern, cache=str(tmp_path / cache)))


def test_only_texts_are_packed_into_the_cache(texts: Path, make_data: MakeData) -> None:
    check_cache(make_data(texts, format="tokens", cache=str(texts / "cache")))


def test_the_folder_of_the_user_is_checked_too(
    texts: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(texts / ".cache"))
    check_cache(make_data(texts))  # hidden files are no documents
    monkeypatch.setenv("XDG_CACHE_HOME", str(texts / "cache"))
    with refused(ConfigError, ".../tokens"):
        check_cache(make_data(texts))


def test_the_path_of_every_source_is_checked(texts: Path, tmp_path: Path) -> None:
    lines = ["data=jsonl", f"data.sources.near.path=[{tmp_path}/none,{texts}]", "data.sources.far.path=memory://a"]
    lines += ["data.mix={near: 1, far: 1}", f"data.cache={texts}/cache", "data.pattern='**/*.json'"]
    with refused(ConfigError, ".../cache") as problems:
        Corpora(load(lines))
    assert "data.sources.near.path" in problems[0].message


def test_the_files_checked_are_those_that_are_written(
    texts: Path, tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file of a block, while it is packed and afterwards, is refused by a pattern with its name's form."""
    data, seen = make_data(texts, cache=str(texts / "cache")), set[str]()
    rename = Path.replace

    def look(path: Path, target: str) -> Path:
        seen.update(found.relative_to(texts).as_posix() for found in cache_folder(data).rglob("*") if found.is_file())
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", look)
        pack_block(Tokens.of(data), cache_folder(data), Noted.write(tmp_path / "noted", [b"one"]))
    seen |= {found.relative_to(texts).as_posix() for found in cache_folder(data).rglob("*") if found.is_file()}
    endings = {name.rpartition(".")[2] for name in seen} & {"idx", "bin", "hash", "json", "lock"}
    assert len(endings) == 5
    for name in (name for name in seen if not re.search(r"(^|/)\.", name)):  # hidden files are no documents
        inside = name.count("/")
        for pattern in ("/".join(["*"] * (inside + 1)), *([f"**/*{Path(name).suffix}"] if inside == 2 else [])):
            with pytest.raises(ConfigError):
                check_cache(make_data(texts, cache=data.cache, pattern=pattern))
