"""The text of recipe files of a user's own: a packaged recipe to start from, or a config that builds on a recipe."""

from __future__ import annotations

import os
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from engine.config import keys, tree
from engine.config.load import load
from engine.config.own import parse
from engine.config.schema import Config
from engine.errors import ConfigError

_WIDTH = 100
_MISSING = object()
_HOW = """\
To use it (relative paths are relative to the current folder):
  bytescale config show --config {file} --origin   # every key, its value, and where it was set
  bytescale estimate-memory --config {file} --fit  # whether it fits, and the largest capacity and context
  bytescale plan --config {file}                   # which rank computes what; needs no GPU
  bytescale train --config {file} --dry-run        # all checks; then without --dry-run
KEY=VALUE on the command line overrides this file. Runs are written to runs/{stem} unless run.out is set."""
_DATA = """
# Without other documents, a recipe trains on the source files of Python's standard library, as bytes (docs/data.md).
{steps}
# data:
#   path: corpus
#   tokenizer: tokenizer.json"""
_NO_LENGTHS = "remove `override /lengths` there (named lengths are planned instead of documents), "
_DEFAULTS = "what to start from: an option of each group; `bytescale config show` has their keys"


def own_copy(name: str, file: Path) -> str:
    """Write the packaged recipe `name` as the text of `file`: what its base sets and what it sets, in one file.

    Each key has its description above it. The name of the recipe is left out, so that it is the name of the file.
    """
    text = tree.text_of("recipe", name)
    values, _ = parse(text, Path(name))
    entries: list[Any] = []
    comments = [tree.about(text)]
    # The copy does not depend on the packaged base, which a later version may change.
    above = values.pop("defaults", [])
    while above:
        entry, *above = above
        if isinstance(entry, str):
            base = tree.text_of("recipe", entry)
            comments.append(tree.about(base))
            below, _ = parse(base, Path(entry))
            # A base may have a base, which it names relative to its own folder.
            of_base = below.pop("defaults", [])
            above = [str(Path(entry).with_name(one)) if isinstance(one, str) else one for one in of_base] + above
            values = _merged(below, values)
        else:
            # An option of the recipe replaces that of its base for the same group.
            (key,) = entry
            entries = [other for other in entries if key not in other] + [entry]
    values.pop("recipe", None)
    how = _HOW.format(file=shlex.quote(str(file)), stem=file.stem)
    lines = [line for text in comments for line in _comment(text)]
    lines += ["", f"# A copy of the packaged recipe {name}.", *(f"# {line}" for line in how.splitlines()), ""]
    if entries:
        chosen = [f"  - {key}: {option}" for entry in entries for key, option in entry.items()]
        lines += [f"# {_DEFAULTS}", "defaults:", *chosen, ""]
    lines += _body(values)
    # Most copies are made to train on other documents, so the file contains the lines to change.
    if "data" not in values:
        groups = {key for entry in entries for key in entry}
        data = "make the entry of `override /data` in" if "override /data" in groups else "add to"
        no_lengths = _NO_LENGTHS if "override /lengths" in groups else ""
        steps = f"For other documents {data} `defaults`: `- override /data: jsonl`, {no_lengths}and remove the # here:"
        lines.append(_DATA.format(steps="\n".join(_comment(steps))))
    return "\n".join(lines) + "\n"


def own_variant(base: str, config: Config, file: Path, comments: Sequence[str]) -> str:
    """Write `config` as the text of `file`: its `defaults` name `base`, and below are the values that differ from it.

    `base` is a packaged recipe, or the path of a file of the user's own. `comments` are paragraphs at the top. The name
    of the recipe, and a run folder of this name, are left out, so that they are named after the file.
    """
    below: dict[str, Any] = {}
    with suppress(ConfigError):  # the base alone may lack values that the user set: then all values are written
        below = _values(load([f"recipe={base}"]))
    nested: dict[str, Any] = {}
    named_after = {"recipe", *(["run.out"] if config.run.out == f"runs/{config.recipe}" else [])}
    for key, value in _values(config).items():
        if key not in named_after and value != below.get(key, _MISSING):
            *sections, name = key.split(".")
            inner = nested
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[name] = value
    if tree.is_path(base):
        base = f"./{os.path.relpath(Path(base).expanduser().resolve(), file.resolve().parent)}"
    lines = [line for text in comments for line in _comment(text)]
    return "\n".join([*lines, "", "defaults:", f"  - {base}", "", *_body(nested)]) + "\n"


def _values(config: Config) -> dict[str, Any]:
    """All values of a config, by dotted key."""
    dumped, found = config.model_dump(mode="json"), {}
    for key in keys.leaves():
        value: Any = dumped
        for part in key.split("."):
            value = value[part]
        found[key] = value
    return found


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested dicts: `above` overrides `below`."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _body(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the lines of nested values in the schema's order: each key below its description."""
    leaves, indent = keys.leaves(), "  " * prefix.count(".")
    order = [key.removeprefix(prefix).split(".")[0] for key in leaves if key.startswith(prefix)]
    for name, value in sorted(values.items(), key=lambda item: order.index(item[0])):
        if isinstance(value, Mapping) and f"{prefix}{name}" not in leaves:
            yield from ([] if prefix else [""])
            yield f"{indent}{name}:"
            yield from _body(value, f"{prefix}{name}.")
        else:
            about = leaves[f"{prefix}{name}"].description
            yield from (indent + line for line in _comment(about or ""))
            # A list of one value has the same form for scalars and lists; its brackets are removed.
            yield f"{indent}{name}: {yaml.safe_dump([value], default_flow_style=True, width=1e9).strip()[1:-1]}"


def _comment(text: str) -> list[str]:
    """Format a text as lines of comments."""
    return [f"# {line}" for line in textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)]
