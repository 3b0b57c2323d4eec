"""Describes the keys of the schema for people and for editors: type, unit, allowed values, default, and meaning."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.config import keys, tree, versions
from engine.config.explain.origin import origins
from engine.config.explain.spelling import did_you_mean
from engine.config.load import load
from engine.config.resolved import FORMAT, flat
from engine.config.schema import Config, Section
from engine.config.units import format_count, unit_of
from engine.errors import ConfigError

_TYPES = {
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "string": "text",
    "array": "list",
    "object": "mapping",
    "null": "null",
}
_BOUNDS = {  # pydantic's names, JSON schema's, and words
    "ge": ("minimum", "at least"),
    "gt": ("exclusiveMinimum", "more than"),
    "le": ("maximum", "at most"),
    "lt": ("exclusiveMaximum", "less than"),
}


_NO_BOUND = 2**63 - 1  # the largest number of 64 bits


@dataclass(frozen=True)
class Key:
    """A key of the schema. `default` is its value in the quickstart, and `set_by` the file and line of that."""

    key: str
    about: str | None
    type: str  # "whole number", "text or null", "adamw or sgd"
    unit: str | None  # "tokens" or "bytes"
    allowed: list[str | int] | None  # the values of an enum
    bounds: list[str]  # ["at least 1", "at most 64"]
    example: str | None  # of a list or a mapping: an override that sets it, as one types it in a shell
    default: Any
    set_by: str | None

    @property
    def kind(self) -> str:
        """Type, unit and bounds in words, such as "whole number of tokens, at least 1, at most 4G"."""
        return ", ".join([f"{self.type} of {self.unit}" if self.unit else self.type, *self.bounds])

    @property
    def default_text(self) -> str:
        """The default as a user writes it, such as 16K."""
        if self.unit and self.default is not None:
            return format_count(self.default, bytes_=self.unit == "bytes")
        return self.default if isinstance(self.default, str) else json.dumps(self.default)


@dataclass(frozen=True)
class Described:
    """A section of keys, a group of options such as those of `planner=`, or both; or a single key."""

    name: str
    about: str | None
    options: Mapping[str, str]  # and what they are
    keys: list[Key]
    inner: Mapping[str, str]  # sections and groups below this one, and what they are


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a resolved config. Numbers of tokens and bytes are whole numbers there."""

    def standard(node: Any) -> Any:
        """Rename the bounds of optional lengths, which pydantic leaves under its own names."""
        if isinstance(node, list):
            return [standard(one) for one in node]
        if not isinstance(node, dict):
            return node
        return {
            _BOUNDS[name][0] if name in _BOUNDS and not isinstance(one, dict) else name: standard(one)
            for name, one in node.items()
        }

    schema = standard(Config.model_json_schema())
    number = {"const": versions.newest(), "description": "number of the format", "type": "integer"}
    schema["properties"] = {FORMAT: number, **schema["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "ByteScale config"}


def describe(name: str) -> Described:
    """Describe the section, group or key `name`. Raises ConfigError with the nearest names if there is none."""
    key = keys.leaf_of(name)
    sections, groups, leaves = _sections(), tree.groups(), list(keys.leaves())
    if key not in {*sections, *groups, *leaves}:
        dotted = [one for one in (*leaves, *sections) if "." in one]
        names = dotted if "." in name else [*leaves, *sections, *groups]
        hint = did_you_mean(name, names, "`bytescale config help` lists all sections")
        raise ConfigError("unknown key", key=name, hint=hint)
    own = [leaf for leaf in leaves if key in (leaf, leaf.rpartition(".")[0])]
    options = {option: tree.about(tree.text_of(key, option)) for option in groups.get(key, ())}
    inner = {one: about for one, about in sections.items() if one.rpartition(".")[0] == key}
    return Described(key, sections.get(key), options, list(_described(own)), inner)


def overview() -> Described:
    """Describe the keys outside sections; name all sections, and the groups that are no sections."""
    top, sections = [key for key in keys.leaves() if "." not in key], _sections()
    inner = {name: about for name, about in sections.items() if "." not in name}
    groups = {name: f"sets several keys: {name}={'|'.join(options)}" for name, options in tree.groups().items()}
    others = {name: about for name, about in groups.items() if name not in inner and name not in top}
    return Described("", None, {}, list(_described(top)), inner | others)


def places_of(config: Config, overrides: Sequence[str]) -> dict[str, str]:
    """Return the place of each key of a config that was loaded with these overrides, as `origins` does.

    It is `run.weights` for values of the recipe's model that were replaced by those of the weights.
    """
    found = origins(overrides)
    if config.run.weights is not None:
        before, after = (flat(one.model_dump(mode="json")) for one in (load(overrides, rules=False), config))
        found |= {key: "run.weights" for key, value in after.items() if before.get(key, value) != value}
    return found


def _sections() -> dict[str, str]:
    """Return the first line of the docstring of each section: {"optimizer": "The update rule, ...", ...}."""

    def walk(section: type[Section], prefix: str) -> Iterator[tuple[str, str]]:
        for name, field in section.model_fields.items():
            inner = keys.section_of(field)
            if inner:
                yield f"{prefix}{name}", (inner.__doc__ or "").partition("\n")[0]
                yield from walk(inner, f"{prefix}{name}.")

    return dict(walk(Config, ""))


def _described(names: list[str]) -> Iterator[Key]:
    """Describe keys, with the values of the quickstart as their defaults."""
    values, places, schema = load([]).model_dump(mode="json"), origins([]), json_schema()
    for name in names:
        value, node = values, schema
        for part in name.split("."):
            value = value[part]
            node = node["properties"][part]
            node = schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
        unit = unit_of(keys.leaves()[name])
        members = node.get("anyOf", [node])
        types, allowed, bounds = list[str](), list[str | int](), list[str]()
        for member in members:
            options = member.get("enum", [member["const"]] if "const" in member else [])
            allowed += options
            types += map(str, options) if options else [_TYPES[member["type"]]]
            for long, words in _BOUNDS.values():
                if long in member and member[long] < _NO_BOUND:
                    bounds.append(f"{words} {_bound(member[long], unit)}")
        if keys.is_path(name):
            types = ["path" if one == "text" else one for one in types]
        example = keys.example(name) if {"list", "mapping"} & {*types} else None
        about, options = node.get("description"), allowed or None
        yield Key(name, about, " or ".join(types), unit, options, bounds, example, value, places.get(name))


def _bound(bound: float, unit: str | None) -> str:
    """Write a bound as a user does: 4G tokens, 99,999,999, 1e-12."""
    if unit:
        return format_count(int(bound), bytes_=unit == "bytes")
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"
