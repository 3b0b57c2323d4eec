"""The keys of the typed schema, for lookups by name."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic.fields import FieldInfo

from engine.config.schema import Config, Section

PATHS = ("data.path", "run.out", "run.weights", "cluster.hostfile", "cluster.calibration", "lengths.path")


def leaves() -> dict[str, FieldInfo]:
    """Return every key that holds a value: {"context": ..., "run.steps": ..., ...}."""
    return dict(_walk(Config, ""))


def sections() -> list[str]:
    """Return the keys that hold other keys: ["run", "model", "model.rope", ...]."""
    return sorted({key.rpartition(".")[0] for key in leaves()} - {""})


def _walk(section: type[Section], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        inner = section_of(field)
        if inner:
            yield from _walk(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def section_of(field: FieldInfo) -> type[Section] | None:
    """Return the section that a field holds, or None if it holds a value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None
