"""Checks KEY=VALUE overrides against the recipes and the schema before Hydra applies them.

Hydra stops at the first bad override and hints at `+key`, which is the wrong way out of a typing mistake; here every
override is judged by itself, so all mistakes are reported together.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from engine.config import keys, tree
from engine.config.not_built import not_built
from engine.config.spelling import did_you_mean
from engine.errors import Problem

_IN_HOSTFILE = ("cluster.nodes", "cluster.ranks_per_node")
_FEW = 6
_NULLABLE = ("cluster.hostfile", "cluster.calibration", "lengths.path")


def check(texts: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """Return the overrides that may be applied, and what is wrong with the others."""
    good, problems = [], []
    for text in map(_path_quoted, texts):
        problem = _spelling(text) or _meaning(text)
        if problem is None:
            good.append(text)
        else:
            problems.append(problem)
    return good, problems + _beside_hostfile(good)


def _beside_hostfile(texts: Sequence[str]) -> list[Problem]:
    """Return what is wrong with numbers of nodes and ranks that nobody would read."""
    values = dict(text.split("=", 1) for text in texts)
    if values.get("cluster.hostfile", "null") == "null":
        return []
    hint = "leave it out, or change the hostfile"
    return [Problem("comes from cluster.hostfile", key, hint) for key in _IN_HOSTFILE if key in values]


def _quoted(value: str) -> str:
    """Return a value so that Hydra's grammar reads it as this text, whatever it holds."""
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', value)  # backslashes are doubled only before a quote,
    end = len(escaped) - len(escaped.rstrip("\\"))  # as the closing one is
    return '"' + escaped + "\\" * end + '"'


def _path_quoted(text: str) -> str:
    """Return KEY=PATH with the path as a shell's user means it: `~` is the home folder, a comma is a comma."""
    key, equals, value = text.partition("=")
    if key not in keys.PATHS or not value or value[0] in "'\"" or (key in _NULLABLE and value == "null"):
        return text
    return f"{key}{equals}{_quoted(str(Path(value).expanduser()) if value.startswith('~') else value)}"


def _spelling(text: str) -> Problem | None:
    """Return what is wrong with the form of one override, before its key is looked up."""
    key, equals, value = text.partition("=")
    if text.startswith(("+", "~")):
        return Problem(f"{text[0]} is not used here", text, "keys are neither added nor removed; write KEY=VALUE")
    if not equals or not key:
        hint = f"write recipe={text}" if text in tree.recipes() else "for example run.steps=100"
        return Problem("is not KEY=VALUE", text, hint)
    if not value:
        return Problem("has no value", text, f"write {key}=VALUE, or leave it out")
    return None


def _meaning(text: str) -> Problem | None:
    """Return what is wrong with the key or the kind of value of one override that is spelt KEY=VALUE."""
    key, _, value = text.partition("=")
    try:
        override: Override = OverridesParser.create().parse_override(text)
    except HydraException:
        return Problem("cannot be read", text, f"put it in quotes, twice: '{key}=\"{value}\"'")
    if override.is_sweep_override():
        return Problem("gives several values", text, f"give one, or quote it: '{key}=\"{value}\"'")
    if key in tree.groups():
        return _choice(key, override.value())
    return _key(key, override.value())


def _choice(group: str, value: object) -> Problem | None:
    """Return what is wrong with the option chosen for a group."""
    options = tree.groups()[group]
    if value in options:
        return None
    listed = ", ".join(options)
    if isinstance(value, (dict, list)):
        return Problem(
            "is a group, not a value", group, f"choose one of {listed}, then set its keys: {group}.KEY=VALUE"
        )
    hint = did_you_mean(str(value), options)
    if hint is None or len(options) <= _FEW:
        hint = f"{hint} there are {listed}" if hint else f"there are {listed}"
    return not_built(group, value, listed) or Problem(f"there is no {group} {value}", group, hint)


def _key(key: str, value: object) -> Problem | None:
    """Return what is wrong with a key that is no group."""
    leaves, dotted = keys.leaves(), key.replace("/", ".")
    if key in leaves:
        return None
    if dotted in leaves:
        return Problem("there is no such key", key, f"parts of a key are joined by points: {dotted}=...")
    if dotted in keys.sections():  # also model/rope=yarn, as Hydra chooses a nested group
        inner = [name for name in leaves if name.startswith(f"{dotted}.")]
        takers = [f"{name}={value}" for name in inner if value in get_args(leaves[name].annotation)]
        way = f"set {takers[0]}, then what it takes" if takers else f"set one of {', '.join(inner)}"
        return Problem("holds other keys and has no value itself", key, way)
    return Problem("there is no such key", key, _nearest_key(key))


def _nearest_key(key: str) -> str | None:
    """Return which key a mistyped one may be meant to be, or where to look for it."""
    section, _, name = key.rpartition(".")
    leaves = list(keys.leaves())
    if section not in keys.sections():
        groups = [] if section else tree.groups()
        return did_you_mean(key, [*leaves, *groups], "`bytescale config show` lists all keys")
    inner = [leaf for leaf in leaves if leaf.startswith(f"{section}.")]
    listed = dict.fromkeys(leaf.removeprefix(f"{section}.").split(".")[0] for leaf in inner)
    elsewhere = [leaf for leaf in leaves if leaf.endswith(f".{name}")]
    return did_you_mean(key, [*inner, *elsewhere], f"{section} holds {', '.join(listed)}")
