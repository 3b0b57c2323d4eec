"""Checks KEY=VALUE overrides against the recipes and the schema before Hydra applies them.

Hydra stops at the first bad override and suggests `+key`, which is wrong for a typing mistake. Here every override is
checked separately, so that all problems are reported together.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException

from engine.config import keys, tree
from engine.config.choices import values_of
from engine.config.explain.spelling import did_you_mean
from engine.config.schema import SOURCE_NAME, Source
from engine.config.validate import NAME_RULE
from engine.config.versions import replacement
from engine.errors import Problem

_IN_HOSTFILE = ("cluster.nodes", "cluster.ranks_per_node")
_NULLABLE = ("cluster.hostfile", "cluster.calibration", "lengths.path", "data.cache", "run.weights")
_THOUSANDS = re.compile(r"[1-9]\d{0,2}(,\d{3})+")  # to Hydra these are several values
_DEEPEST = 20  # brackets in brackets; no key needs more than four
_NOT_ASCII = re.compile(r"[\w-]*[^\W\x00-\x7f][\w-]*(?=\s*:\s*[{\d])")  # a name of a source, or of its weight
_DIGITS = re.compile(r"\d{300}")
_SHORT_LIST = 8  # up to this many options, a hint lists them all after the nearest name


def check(texts: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """Return the overrides that Hydra can apply, with paths quoted, and the problems.

    There is a problem for each other override, and for each key that conflicts with cluster.hostfile.
    """
    good, problems = [], []
    for text in map(_quote_path, texts):
        problem = _problem(text)
        if problem is None:
            good += _for_hydra(text)
        elif problem not in problems:  # a name of a source may be in several
            problems.append(problem)
    values = dict(text.split("=", 1) for text in good)
    if values.get("cluster.hostfile", "null") != "null":
        hint = "remove it, or change the hostfile"
        problems += [Problem("is set by cluster.hostfile", key, hint) for key in _IN_HOSTFILE if key in values]
    return good, problems


def _for_hydra(text: str) -> list[str]:
    """Return a valid override as Hydra takes it: names of sources are new keys, and whole mappings replace others.

    A mapping in place of a list replaces it, too, so that validation can say what is wrong with it.
    """
    key, _, value = text.partition("=")
    new = "++" if key.startswith(f"{keys.SOURCES}.") else ""
    if (key in keys.NESTED and value != "null") or (value.startswith("{") and keys.is_list(key)):
        return [f"{new}{key}=null", f"++{text}"]
    return [new + text]


def _quote_path(text: str) -> str:
    """Quote the value if the key is a path, so that Hydra reads commas and braces literally, and expand `~`.

    Other overrides, and values that are quoted already, are returned unchanged. `[a, b]` is a list of paths.
    """
    key, equals, value = text.partition("=")
    if not keys.is_path(key) or not value or value[0] in "'\"" or (key in _NULLABLE and value == "null"):
        return text
    if value.startswith("[") and value.endswith("]") and (key == "data.path" or key.startswith(keys.SOURCES)):
        if '"' in value or "'" in value:
            return text
        items = [_quote_path(f"data.path={item.strip()}").partition("=")[2] for item in value[1:-1].split(",")]
        return f"{key}=[{','.join(items)}]"
    path = str(Path(value).expanduser()) if value.startswith("~") else value
    return key + equals + quoted(path)


def quoted(value: str) -> str:
    """Quote a text, so that Hydra reads every character of it literally."""
    # In Hydra's grammar backslashes are doubled only before a quote, and so before the closing quote.
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', value)
    trailing = len(escaped) - len(escaped.rstrip("\\"))
    return '"' + escaped + "\\" * trailing + '"'


def _problem(text: str) -> Problem | None:
    """Check the form of an override and its key, or its option if the key is a group; values are validated later."""
    key, equals, value = text.partition("=")
    # Hydra suggests `+key` for a typing mistake, so the hint names the key that was meant.
    if text.startswith(("+", "~")):
        hint, plain = "write KEY=VALUE: keys cannot be added or removed", key.lstrip("+~")
        wrong = None if plain in tree.groups() else key_problem(plain, value)
        meant = f"; {wrong.hint}" if wrong and wrong.hint and wrong.hint.startswith("did you mean") else ""
        return Problem(f"a leading {text[0]} is not supported", text, hint + meant)
    if key.startswith(f"{keys.SOURCES}.") and equals:
        problem = _source_problem(key)  # Hydra could not parse all names
        if problem is not None:
            return problem
    if not equals or not key:
        is_recipe = text in tree.recipes() or text.lower().endswith((".yaml", ".yml"))
        hint = f"write recipe={text}" if is_recipe else "for example run.steps=100"
        return Problem("is not KEY=VALUE", text, hint)
    if not value:
        return Problem("has no value", text, f"write {key}=VALUE, or remove it")
    # Hydra's grammar calls itself for each bracket, and makes numbers without a limit.
    if max(accumulate((char in "[{(") - (char in ")}]") for char in value)) > _DEEPEST:
        return Problem(f"is more than {_DEEPEST} brackets deep", key, f"`bytescale config help {key}` shows its form")
    if _DIGITS.search(value) and not keys.is_text(key):
        return Problem(
            "is a number with too many digits", key, f"`bytescale config help {key}` shows its allowed values"
        )
    # Hydra reads commas as a sweep over several values, which commands do not support. Usually a list lacks its
    # brackets, or a text its quotes.
    override = _parsed(text)
    if override is None:
        return _unparsed(key, value)
    if override.is_sweep_override():
        if keys.is_list(key) and override.value_type == ValueType.SIMPLE_CHOICE_SWEEP:
            return Problem("is a list without brackets", text, f"write {keys.in_shell(f'{key}=[{value}]')}")
        if _THOUSANDS.fullmatch(value):
            return Problem("has commas", text, f"write {key}={value.replace(',', '')}")
        twice = f", or quote it twice: {keys.in_shell(f'{key}={quoted(value)}')}" if keys.is_text(key) else ""
        return Problem("has several values", text, f"give one value{twice}")
    if key in tree.groups():
        return option_problem(key, override.value())
    return key_problem(key, override.value())


def _parsed(text: str) -> Override | None:
    """Parse an override by Hydra's grammar; None if it is not one."""
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        return None


def _unparsed(key: str, value: str) -> Problem:
    """Explain why Hydra cannot parse KEY=VALUE. What helps depends on the key: quotes, or brackets that are missing."""
    text = f"{key}={value}"
    unknown = None if key in tree.groups() else key_problem(key, value)
    if unknown is not None:
        return unknown
    if key in keys.NESTED and (name := _NOT_ASCII.search(value)):
        return _wrong_name(name[0])
    if keys.is_text(key):
        return Problem("cannot be parsed", text, f"quote it twice: {keys.in_shell(f'{key}={quoted(value)}')}")
    if keys.is_texts(key):
        items = [item.strip().strip("'\"") for item in value.strip("[]").split(",")]
        listed = ",".join(quoted(item) for item in items if item)
        return Problem("cannot be parsed", text, f"quote each value: {keys.in_shell(f'{key}=[{listed}]')}")
    help_ = f"`bytescale config help {key}` shows its allowed values"
    lacks = _unclosed(value)
    if not lacks:
        return Problem("cannot be parsed", text, help_)
    hint = f"write {keys.in_shell(text + lacks)}" if _parsed(text + lacks) else f"close it; {help_}"
    return Problem(f"lacks {lacks} at its end", text, hint)


def _unclosed(value: str) -> str:
    """Return what a value lacks at its end: `]}` of `{a: [1`, or a quote; empty if it lacks nothing."""
    closing, ends = {"{": "}", "[": "]", "(": ")", "'": "'", '"': '"'}, list[str]()
    for character in value:
        if ends and character == ends[-1]:
            ends.pop()
        elif character in closing and not (ends and ends[-1] in "'\""):
            ends.append(closing[character])
    return "".join(reversed(ends))


def option_problem(group: str, value: object) -> Problem | None:
    """Check the option chosen for a group, such as `adaptive` in planner=adaptive."""
    options = tree.groups()[group]
    if value in options:
        return None
    listed = ", ".join(options)
    if isinstance(value, (dict, list)):
        advice = f"choose one of {listed}; then set its keys: {group}.KEY=VALUE"
        return Problem("is a group, not a value", group, advice)
    hint = did_you_mean(str(value), options)
    if group == "recipe" and Path(f"{value}.yaml").is_file():
        hint = f"write recipe=./{value}.yaml for the file in this folder"
    elif hint is None or len(options) <= _SHORT_LIST:
        hint = f"{hint or ''} choose one of {listed}".lstrip()
    return Problem(f"unknown name: {value}", group, hint)


def key_problem(key: str, value: object) -> Problem | None:
    """Check that a key exists and is not a section. `value` is used for the hint only."""
    leaves, sections = keys.leaves(), keys.sections()
    dotted = key.replace("/", ".")
    if key in leaves:
        return None
    if (instead := replacement(key)) is not None:
        return Problem("is gone", key, f"write {instead}")
    if key.startswith(f"{keys.SOURCES}."):
        return None  # `_problem` has checked it
    if key.startswith(f"{keys.MIX}."):
        return Problem(
            "has no keys that can be set separately", keys.MIX, "write all weights: 'data.mix={web: 3, code: 1}'"
        )
    if dotted in leaves:
        return Problem("unknown key", key, f"join the parts of a key with dots: {dotted}=...")
    if dotted in sections:  # also model/rope=yarn, Hydra's form for an option of a nested group
        inner = [name for name in leaves if name.startswith(f"{dotted}.")]
        accepting = [f"{name}={value}" for name in inner if value in values_of(leaves[name])]
        advice = f"set {accepting[0]} and its parameters" if accepting else f"set one of {', '.join(inner)}"
        return Problem("is a section and has no value", key, advice)
    section, _, name = key.rpartition(".")
    if section in sections:
        inner = [leaf for leaf in leaves if leaf.startswith(f"{section}.")]
        elsewhere = [leaf for leaf in leaves if leaf.endswith(f".{name}")]
        listed = dict.fromkeys(leaf.removeprefix(f"{section}.").split(".")[0] for leaf in inner)
        hint = did_you_mean(key, [*inner, *elsewhere], f"keys of {section}: {', '.join(listed)}")
    else:
        names = [*leaves, *([] if section else tree.groups())]
        hint = did_you_mean(key, names, "`bytescale config show` lists all keys")
    return Problem("unknown key", key, hint)


def _source_problem(key: str) -> Problem | None:
    """Check a key below data.sources: data.sources.NAME, or data.sources.NAME.KEY."""
    name, _, inner = key.removeprefix(f"{keys.SOURCES}.").partition(".")
    if not re.match(SOURCE_NAME, name):
        return _wrong_name(name)
    if not inner or inner in Source.model_fields:
        return None
    listed = f"keys of data.sources.{name}: {', '.join(Source.model_fields)}"
    hint = did_you_mean(inner, Source.model_fields, listed)
    return Problem("unknown key", key, hint)


def _wrong_name(name: str) -> Problem:
    return Problem(NAME_RULE, f"{keys.SOURCES}.{name}", "for example data.sources.web.path=FOLDER")
