"""The keys of the schema, for lookups by name."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic.fields import FieldInfo

from engine.config.schema import Config, Section

PATHS = (
    *("data.path", "data.tokenizer", "data.cache", "lengths.path"),
    *("run.out", "run.weights", "cluster.hostfile", "cluster.calibration"),
)


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
