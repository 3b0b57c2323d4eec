"""The keys of the schema, for lookups by name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from engine.config.choices import values_of
from engine.config.schema import Config, Section, Segment, Source

PATHS = (
    *("data.path", "data.tokenizer", "data.cache", "lengths.path"),
    *("run.out", "run.weights", "run.notice_file", "cluster.hostfile", "cluster.calibration"),
)
SOURCES, MIX = "data.sources", "data.mix"  # keys with nested values, whose names the user chooses
NESTED: Mapping[str, type[Section]] = {SOURCES: Source, MIX: Segment}


def is_path(key: str) -> bool:
    """Return whether a key's value is a path or a list of paths, as it is of data.path and data.sources.web.path."""
    return key in PATHS or (key.startswith(f"{SOURCES}.") and key.endswith(".path"))


def is_list(key: str) -> bool:
    """Return whether a key's value can be a list, as that of run.trackers."""
    return any(get_origin(kind) is tuple for kind in _kinds(key))


def is_text(key: str) -> bool:
    """Return whether a key's value can be any text, as that of run.out and of data.sources.web.pattern."""
    texts = any(kind is str or (get_origin(kind) is Annotated and get_args(kind)[0] is str) for kind in _kinds(key))
    return texts and not values_of(field_at(key))


def is_texts(key: str) -> bool:
    """Return whether a key's value is a list of any texts, as that of slurm.extra."""
    return any(get_origin(kind) is tuple and get_args(kind)[0] is str for kind in _kinds(key))


def _kinds(key: str) -> tuple[Any, ...]:
    """Return the type of a key's value, or each type of a union; empty if there is no such key."""
    field = field_at(key)
    kind = field.annotation if field else None
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def example(key: str) -> str | None:
    """Return an override that sets a key to the schema's example, as one types it in a shell; None without example."""
    field = field_at(key)
    return in_shell(f"{key}={field.examples[0]}") if field and field.examples else None


def in_shell(override: str) -> str:
    """Quote an override that a shell would split or would take quotes from: 'data.mix={web: 3, code: 1}'."""
    if not re.search(r"""[\s'"{}()\\$]""", override):
        return override
    # shlex writes a single quote as '"'"', which is hard to read.
    return f'"{override}"' if "'" in override and not re.search(r'["\\$`!]', override) else shlex.quote(override)


def leaf_of(key: str) -> str:
    """Return the key of the schema that a place belongs to: `data.sources` of data.sources.web.path."""
    return next((leaf for leaf in (SOURCES, MIX) if key.startswith(f"{leaf}.")), key)


def field_at(place: str) -> FieldInfo | None:
    """Return the field of a key, or of what is at a place below it: a key of a source or of a segment."""
    key = leaf_of(place)
    inner = place.removeprefix(f"{key}.").split(".")
    if key in NESTED and len(inner) > 1 and inner[1] in NESTED[key].model_fields:
        return NESTED[key].model_fields[inner[1]]
    return leaves().get(key)


def leaves() -> dict[str, FieldInfo]:
    """Return the pydantic field of every key that has a value: {"context": field, "run.steps": field, ...}."""

    def walk(section: type[Section], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
        for name, field in section.model_fields.items():
            inner = section_of(field)
            if inner:
                yield from walk(inner, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", field

    return dict(walk(Config, ""))


def sections() -> list[str]:
    """List every key that contains other keys: ["balance", "cluster", ..., "model", "model.rope", ...]."""
    return sorted({key.rpartition(".")[0] for key in leaves()} - {""})


def section_of(field: FieldInfo) -> type[Section] | None:
    """Return the class of a field that is a section, or None for a field that has a value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None
