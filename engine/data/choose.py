"""Chooses the format of documents by what is at `data.path`, where no `data=` names one."""

from __future__ import annotations

import glob
import os
import posixpath
import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from engine.config import schema
from engine.config.load import load, read_resolved
from engine.config.named import sets
from engine.config.overrides import quoted
from engine.config.own import separate
from engine.config.secret import has_secret
from engine.config.sources import BUILT_IN, pattern_of
from engine.config.tree import groups
from engine.config.units import counted
from engine.data.sources.compressed import SUFFIXES, unpacked
from engine.data.sources.content import HEAD, check, recognise
from engine.data.sources.files import below, kind, matches, reading, split_glob
from engine.data.sources.folder import LINES, STDLIB
from engine.data.sources.formats import FORMATS
from engine.data.sources.urls import is_url
from engine.errors import ConfigError, DataError
from engine.run.folder import RunFolder

_HEAD = 1 << 20  # bytes of a file that are examined: a line of JSON may be long
# Files that describe the documents next to them
_BESIDE = re.compile(r"(?i)^(readme|licen[sc]e|notice|citation|changelog)|\.(md|json|ya?ml)$")
_OTHER = "other"  # what no format reads: images, or the tokens of a token file


class Choice(NamedTuple):
    """A format, the overrides that choose it, and a description of the documents, for a message."""

    format: str
    overrides: list[str]
    found: str


def with_format(
    overrides: Sequence[str], say: Callable[[str], None] = lambda line: None, of_job: bool = False
) -> list[str]:
    """Add those that choose the format of documents to overrides of `load` that set `data.path`, but no `data=`.

    `say` gets a line with what was chosen. The run in the run folder keeps its format as long as `data.path` is the
    same, even if the files have changed. That folder is `run.out`, or for a process of a job (`of_job`) runs/RECIPE. A
    path that does not exist gets no format: reading it reports the error. Raises ConfigError if the content does not
    decide, and DataError if it cannot be read, or is JSON, but not JSON lines.
    """
    try:
        config = load(overrides, rules=False)
    except ConfigError:
        return [*overrides]  # `load` with its rules reports it
    data = config.data
    # Nothing is opened at a URL with a secret, and no message shows it: a rule refuses it.
    if data.sources or not data.paths or any(map(has_secret, data.paths)):
        return [*overrides]
    others, own, _ = separate(overrides)
    pattern = data.pattern if sets("data.pattern", others, own) else None
    resumed = of_job or any(text.startswith("run.out=") for text in overrides)  # any other run gets a new folder
    choice = _of_run(RunFolder(Path(config.run.out)), data, pattern) if resumed else None
    choice = choice or choose(data, pattern)
    if choice is None:
        return [*overrides]
    if data.path not in BUILT_IN:
        keys = [text for text in choice.overrides if text.startswith(("data=", "data.format="))]
        say(f"{data.place}: {choice.found}, so {' '.join(keys)}")
    return [*overrides, *choice.overrides]


def _of_run(folder: RunFolder, data: schema.Data, pattern: str | None) -> Choice | None:
    """Return the format of the run in the folder, if it has the same documents."""
    try:
        before = read_resolved(folder.resolved).data
    except (ConfigError, OSError):  # no run, or one that this version cannot read
        return None
    if before.sources or [*map(os.path.realpath, before.paths)] != [*map(os.path.realpath, data.paths)]:
        return None
    chosen = [f"data={before.name}"]
    if before.format != before.name:
        chosen.append(f"data.format={before.format}")
    if not pattern:
        chosen.append(f"data.pattern={quoted(before.pattern)}")
    return Choice(before.format, chosen, f"the format of the run in {folder.root}")


def choose(data: schema.Data, pattern: str | None = None) -> Choice | None:
    """Choose a format by the files at `data.path`; of a folder, by those that match `pattern` if it is set.

    None if no file exists there. Raises ConfigError if there are files of several formats.
    """
    chosen = [_choose(path, pattern) for path in data.paths]
    found = [one for one in chosen if one is not None]
    if not found or len(found) < len(chosen):
        return None
    if len(found) == 1:
        return found[0]
    formats = Counter(one.format for one in found)
    patterns = {text for one in found for text in one.overrides if text.startswith("data.pattern=")}
    if len(formats) > 1 or len(patterns) > 1 or any(text.startswith("data.path=") for text in found[0].overrides):
        raise _ambiguous(data.path_text, formats, "names", "path")
    return Choice(found[0].format, found[0].overrides, f"{len(found)} paths with {_words(found[0].format)}")


def _choose(path: str, pattern: str | None) -> Choice | None:
    """Choose the format of one path."""
    if path in BUILT_IN:
        option = {STDLIB: "stdlib", LINES: "lines"}[path]
        return Choice(option, [f"data={option}"], "the source files of Python's standard library")
    if not is_url(path):
        prefix = path.removesuffix(".idx").removesuffix(".bin")
        if all(Path(f"{prefix}{ending}").is_file() for ending in (".idx", ".bin")):
            return _tokens(prefix)
    name = _by_suffix(path)
    if is_url(path) and name is not None:  # nothing is read through the network
        return Choice(name, _overrides(name, pattern), f"{_words(name)} by its name")
    found = kind(path)
    if found == "file":
        return _of_file(path, pattern)
    root, selects = (path, pattern or "**/*") if found == "folder" else split_glob(path)
    if not selects or kind(root) != "folder":
        return None
    if found == "folder" and any(
        kind(posixpath.join(root, one)) == "file" for one in ("dataset_dict.json", "state.json")
    ):
        return Choice("arrow", ["data=arrow"], "a folder of Hugging Face's save_to_disk")
    names = sorted(below(root, selects))
    return _of_files(path, root, names, found != "folder", pattern) if names else None


def _keys(format: str) -> list[str]:
    """Return the overrides that name a format: by its file in `recipes/data`, or by its key if it has none."""
    return [f"data={format}"] if format in groups()["data"] else ["data=folder", f"data.format={format}"]


def _overrides(format: str, pattern: str | None) -> list[str]:
    """Return the overrides that choose a format, and the files of a folder; without `pattern`, those of the format."""
    keys = _keys(format)
    if pattern is None and len(keys) > 1:  # no file in `recipes/data` sets the pattern of the format
        pattern = pattern_of(format)
    return [*keys, f"data.pattern={quoted(pattern)}"] if pattern else keys


def _tokens(prefix: str) -> Choice:
    return Choice("tokens", ["data=tokens", f"data.path={quoted(prefix)}"], f"a token file, {prefix}.idx")


def _of_file(path: str, pattern: str | None) -> Choice:
    """Choose the format of a single file. A text is a folder with one document."""
    if not is_url(path):
        with reading(path):  # rejects a named pipe, which has no suffix of a format
            pass
    format = _format(path)
    if format not in ("folder", _OTHER):
        if format in FORMATS and FORMATS[format].unpacked:  # rejects, for example, a JSON array
            with unpacked(path) as file:
                check(file.read(HEAD), format, path, path, unpacked=True)
        return Choice(format, _overrides(format, pattern), _words(format))
    if format == _OTHER:  # rejects a binary file here, where it is known that it alone was named
        with unpacked(path) as file:
            check(file.read(HEAD), "folder", path, path, unpacked=True)
    folder, name = posixpath.split(path)
    inside = [f"data.path={quoted(folder or '.')}", f"data.pattern={quoted(glob.escape(name))}"]
    return Choice("folder", ["data=folder", *inside], "one text")


def _of_files(path: str, root: str, names: Sequence[str], globbed: bool, pattern: str | None) -> Choice:
    """Choose the format of the files in a folder by the first one of each suffix.

    `globbed`: `path` is a glob. `pattern` is `data.pattern`, if it is set.
    """
    # One file of each suffix is opened, because a folder may have millions of files.
    formats, kinds = dict[str, str](), dict[str, list[str]]()
    for name in names:
        suffix = "".join(_suffix(name))
        if suffix not in formats:
            formats[suffix] = _format(posixpath.join(root, name))
        kinds.setdefault(formats[suffix], []).append(name)

    # A README or a JSON file next to rows describes them; next to texts it is a text itself.
    rows = {one: found for one, found in kinds.items() if one not in ("folder", _OTHER)}
    beside = all(_BESIDE.search(posixpath.basename(name)) for name in kinds.get("folder", ()))
    if len(rows) > 1 and "jsonl" in rows and all(_BESIDE.search(posixpath.basename(name)) for name in rows["jsonl"]):
        del rows["jsonl"]  # JSON describes the rows of any other format: dataset_info.json
    if len(rows) > 1 or (rows and "folder" in kinds and not beside):
        counts = Counter({one: len(found) for one, found in kinds.items() if one != _OTHER})
        raise _ambiguous(path, counts, "has", "file")
    # A token file is named by its prefix, so a folder with several leaves the choice to the user.
    format, chosen = next(iter(rows.items()), ("folder", kinds.get("folder", [])))
    if format == "tokens":
        if len(chosen) == 1:
            return _tokens(posixpath.join(root, chosen[0].removesuffix(".idx")))
        hint = "name one by its PREFIX, or all as sources: data.sources.NAME.path=PREFIX"
        raise ConfigError(f"has {len(chosen):,} token files", key=f"data.path={path}", hint=hint)
    named = ""
    if format == "folder" and _OTHER in kinds and not globbed:  # of a repository, the texts of one suffix
        suffixes = Counter("".join(_suffix(name)) for name in chosen)
        common = max(filter(None, suffixes), key=suffixes.__getitem__, default="")
        if common and len(suffixes) > 1:
            chosen, named = [name for name in chosen if name.endswith(common)], f" named *{common}"
    left = len(names) - len(chosen)
    found = f"{counted(len(chosen), 'file')} of {_words(format)}{named}"
    found += f" ({counted(left, 'other file')} {'is' if left == 1 else 'are'} not read)" if left else ""
    # A folder needs a pattern that selects the chosen files. A glob has selected them already, so it must match no
    # others.
    if not globbed:
        return Choice(format, _overrides(format, _pattern(format, chosen, names, path, pattern)), found)
    if left:
        raise _ambiguous(path, Counter({format: len(chosen), _OTHER: left}), "has", "file")
    if format != "folder":
        return Choice(format, _overrides(format, pattern), found)
    return Choice(format, [*_overrides(format, split_glob(path)[1]), f"data.path={quoted(root)}"], found)


def _pattern(format: str, chosen: Sequence[str], names: Sequence[str], path: str, pattern: str | None) -> str | None:
    """Return the `data.pattern` that selects the `chosen` files in the folder; None if that of the format does.

    `pattern` is the one that is set: it matches `names`, which are otherwise all files.
    """
    if pattern and len(chosen) == len(names):
        return pattern
    files = sorted(below(path, "**/*")) if pattern else names
    suffixes = {"".join(_suffix(name)) for name in chosen}
    usual = pattern_of(format)
    for one in (usual, *(f"**/*{suffix}" for suffix in sorted(suffixes)), "**/*"):
        if [name for name in files if matches(name, one)] == [*chosen]:
            return one if pattern or one != usual else None
    if format == "folder":  # with files that are no text
        return pattern
    if pattern:
        raise _ambiguous(path, Counter({format: len(chosen), _OTHER: len(names) - len(chosen)}), "has", "file")
    hint = f"set {' '.join(_keys(format))} and data.pattern, for example data.pattern='**/*{min(suffixes)}'"
    raise ConfigError("has files of one format under several names", key=f"data.path={path}", hint=hint)


def _suffix(name: str) -> tuple[str, str]:
    """Return the suffix of a name, and that of its compression: (".jsonl", ".gz")."""
    stem, suffix = posixpath.splitext(posixpath.basename(name))
    if suffix.lower() not in SUFFIXES:
        return suffix, ""
    return posixpath.splitext(stem)[1], suffix


def _by_suffix(path: str) -> str | None:
    """Return the format that the name of a file says; None if it says none."""
    suffix = _suffix(path)[0]
    return next((name for name, form in FORMATS.items() if suffix in form.suffixes), None)


def _words(format: str) -> str:
    return "tokens" if format == "tokens" else FORMATS[format].words


def _format(path: str) -> str:
    """Return the format of a file by its content and its name, `other` if no format reads it."""
    try:
        with unpacked(path) as file:
            head = file.read(_HEAD)
    except DataError as error:
        if isinstance(error.__cause__, OSError):
            raise
        return _by_suffix(path) or _OTHER  # reading it reports the error
    found = recognise(head)
    if found is not None and found.format in FORMATS:
        return found.format
    # The format that the name says is asked first: the content of its files may look like that of another. An empty
    # file has nothing but its name.
    named = _by_suffix(path)
    if named is not None and (not head or FORMATS[named].begins(head, path, True)):
        return named
    if found is not None:
        return "tokens" if found.format == "tokens" else _OTHER
    return next((name for name, form in FORMATS.items() if form.begins(head, path, False)), "folder")


def _ambiguous(path: str, counts: Mapping[str, int], verb: str, noun: str) -> ConfigError:
    """Create the error for documents of several formats, one of which the user has to choose."""
    parts = [
        f"{counted(count, noun)} of {'another kind' if one == _OTHER else _words(one)}" for one, count in counts.items()
    ]
    ways = [" ".join(_keys(one)) for one in counts if one != _OTHER]
    several = f"choose one: {' or '.join(ways)}, and data.pattern to select its files"
    hint = several if len(ways) > 1 else "name only the files of one format and suffix"
    return ConfigError(f"{verb} {' and '.join(parts)}", key=f"data.path={shlex.quote(path)}", hint=hint)
