"""The keys of the typed schema, for lookups by name."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic.fields import FieldInfo

from engine.config.schema import Config, Section


def leaves() -> dict[str, FieldInfo]:
    """Return every key that holds a value: {"context": ..., "run.steps": ..., ...}."""
    return dict(_walk(Config, ""))


def sections() -> list[str]:
    """Return the keys that hold other keys: ["run", "model", "model.rope", ...]."""
    return sorted({key.rpartition(".")[0] for key in leaves()} - {""})


def _walk(section: type[Section], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        if _is_section(field):
            assert isinstance(field.annotation, type)
            yield from _walk(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, Section)
