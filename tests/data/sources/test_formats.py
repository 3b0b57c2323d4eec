"""What others need to know of a format is in its entry and in its blocks: a test adds one."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bytescale_cli.main import run
from engine.config import schema
from engine.config.load import load, resolved_yaml
from engine.config.sources import source_configs
from engine.data.block_files import read_blocks, write_blocks
from engine.data.choose import choose, with_format
from engine.data.opening import open_sources
from engine.data.places import Known, at_place, places_of
from engine.data.sources.files import find
from engine.data.sources.formats import FORMATS, Format
from engine.data.sources.source import Block, Document, sample_blocks
from engine.data.token_file import TokenFile
from engine.errors import ConfigError
from engine.run.folder import RunFolder

MakeData = Callable[..., schema.Data]
TEXTS = ["one", "two and two", "three\nlines"]


@dataclass(frozen=True)
class StanzaBlock(Block):
    """A text file whose documents are separated by a blank line."""

    path: str
    length: int

    @property
    def files(self) -> list[str]:
        return [self.path]

    @property
    def size(self) -> int:
        return self.length

    def documents(self) -> Iterator[Document]:
        for number, text in enumerate(Path(self.path).read_bytes().split(b"\n\n")):
            yield Document(f"{self.path}:stanza {number}", text)


def stanza_blocks(data: schema.Data) -> list[Block]:
    return [StanzaBlock(path, Path(path).stat().st_size) for path in find(data)]


STANZAS = Format(
    StanzaBlock,
    stanza_blocks,
    lambda data, sample, seed: sample_blocks(stanza_blocks(data), sample, seed),
    pattern="**/*.stanza",
    words="stanzas",
    inside=r"stanza \d+",
    suffixes=(".stanza",),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the added format, beside a file of another one."""
    monkeypatch.setitem(FORMATS, "stanzas", STANZAS)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.stanza").write_text("\n\n".join(TEXTS))
    (tmp_path / "in" / "readme.md").write_text("not a document")
    return tmp_path / "in"


def test_an_added_format_is_listed_and_found_again(folder: Path, make_data: MakeData, tmp_path: Path) -> None:
    source = f"data.sources={{poems: {{path: {folder}, format: stanzas}}}}"
    (data,) = source_configs(load(["data=jsonl", source, "data.mix={poems: 1}"]).data).values()
    blocks = FORMATS["stanzas"].blocks(data)
    write_blocks(tmp_path / "blocks", {"poems": blocks}, "f")
    assert read_blocks(tmp_path / "blocks") == ({"poems": blocks}, "f")
    ((corpus,), _) = open_sources(data.model_copy(update={"cache": str(tmp_path / "cache")}), {"data": blocks})
    known = [Known("data", 0, number, int(hash_)) for number, hash_ in enumerate(corpus.lengths(0).hash())]
    places = [f"{folder}/a.stanza:stanza {number}" for number in range(3)]
    assert [place.place for place in places_of([corpus], known).values()] == places
    assert [at_place([corpus], place)[0][0].document for place in places] == [0, 1, 2]


@pytest.mark.parametrize("path", ["{}", "{}/a.stanza", "{}/*.stanza", "[{}/a.stanza,{}]", "memory://poems/a.stanza"])
def test_files_of_an_added_format_are_found_by_their_names(folder: Path, path: str) -> None:
    """Without a file of the format in recipes/data."""
    named = [f"data.path={path.replace('{}', str(folder))}"]
    data = load(with_format(named)).data
    assert (data.format, data.pattern, data.encoding) == ("stanzas", "**/*.stanza", "utf-8")
    assert load(with_format([*named, "data.pattern='a.*za'"])).data.pattern == "a.*za"


def test_an_added_format_is_shown_and_kept_by_its_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [f"data.path={folder}", f"data.cache={tmp_path / 'cache'}", f"run.out={tmp_path / 'run'}"]
    assert run(["data", "head", *given, "--json"]) == 0
    shown = capsys.readouterr()
    assert "data.format=stanzas" in shown.err and "two and two" in shown.out
    (tmp_path / "run").mkdir()
    config = load(with_format(given))
    RunFolder(tmp_path / "run").resolved.write_text(resolved_yaml(config))
    (folder / "b.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert load(with_format(given)) == config
    with pytest.raises(ConfigError) as caught:
        with_format(given[:1])
    assert "data=folder data.format=stanzas or data=jsonl" in str(caught.value.problems[0].hint)


@pytest.mark.parametrize(
    ("name", "content", "form"),
    [
        ("a.stanza", b'{"text": "one"}\n{"text": "two"}\n', "stanzas"),  # the name is asked before the content
        ("a.stanza", b"\0\1", "stanzas"),
        ("a.stanza.gz", gzip.compress(b"one", mtime=0), "stanzas"),
        ("a.stanza", b"PAR1", "parquet"),
        ("a.txt", b"one", "folder"),
        ("a.parquet", b"one", "folder"),  # such a file begins with PAR1
    ],
)
def test_first_bytes_that_only_another_format_has_count_more(
    name: str, content: bytes, form: str, folder: Path
) -> None:
    (folder / name).write_bytes(content)
    chosen = choose(load(["data=jsonl", f"data.path={folder / name}"], rules=False).data)
    assert chosen is not None and chosen.format == form


def test_an_added_format_is_packed_profiled_and_linted(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ["data=jsonl", f"data.path={folder}", "data.format=stanzas", "data.pattern=**/*.stanza"]

    def answer(*command: str) -> dict[str, Any]:
        assert run([*command, *chosen, f"data.cache={tmp_path / 'cache'}", "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    answer("data", "pack", "--out", str(tmp_path / "a"), "--workers", "1")
    packed = TokenFile.open(tmp_path / "a")
    assert [bytes(packed.read(number, 1, 100).tolist()[:-1]).decode() for number in range(3)] == TEXTS
    assert answer("profile-data")["data"]["samples"] == 3
    assert answer("data", "lint", "--workers", "1")["lint"]["documents"] == 3


def test_an_added_format_is_among_the_values_of_its_key(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "help", "data.format", "--json"]) == 0
    allowed = json.loads(capsys.readouterr().out)["help"]["keys"][0]["allowed"]
    assert allowed == ["folder", "jsonl", "parquet", "arrow", "stanzas", "tokens"]
    assert run(["candidates", "plan", "data.format=s"]) == 0
    assert capsys.readouterr().out.split() == ["data.format=stanzas"]
    assert run(["config", "show", "data.format=stanza", "--json"]) == 2
    assert "did you mean stanzas?" in json.loads(capsys.readouterr().out)["error"]["hint"]


def test_a_format_without_its_traits_is_refused() -> None:
    with pytest.raises(TypeError, match="the entry 'stanzas' is StanzaBlock, not a Format with block, blocks"):
        FORMATS["stanzas"] = StanzaBlock  # type: ignore[assignment]
    with pytest.raises(TypeError, match="missing 3 required positional arguments: 'pattern', 'words', and 'inside'"):
        Format(StanzaBlock, stanza_blocks, STANZAS.sample)  # type: ignore[call-arg]
