"""The keys of the schema, for lookups by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args, get_origin

from pydantic.fields import FieldInfo

from engine.config.schema import Config, Section

PATHS = (
    *("data.path", "data.tokenizer", "data.cache", "lengths.path"),
    *("run.out", "run.weights", "run.notice_file", "cluster.hostfile", "cluster.calibration"),
)
SOURCES, MIX = "data.sources", "data.mix"  # keys with nested values, whose names the user chooses


def is_path(key: str) -> bool:
    """Return whether a key's value is a path or a list of paths, as it is of data.path and data.sources.web.path."""
    return key in PATHS or (key.startswith(f"{SOURCES}.") and key.endswith(".path"))


def is_list(key: str) -> bool:
    """Return whether a key's value can be a list, as that of run.trackers."""
    field = leaves().get(key)
    kind = field.annotation if field else None
    return any(get_origin(one) is tuple for one in (kind, *get_args(kind)))


def leaf_of(key: str) -> str:
    """Return the key of the schema that a place belongs to: `data.sources` of data.sources.web.path."""
    return next((leaf for leaf in (SOURCES, MIX) if key.startswith(f"{leaf}.")), key)


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
