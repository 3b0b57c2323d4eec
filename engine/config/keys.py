"""The keys of the typed schema, for lookups by name, and the nearest name for one that is mistyped."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

from pydantic.fields import FieldInfo

from engine.config.schema import Config, Section


def leaves() -> dict[str, FieldInfo]:
    """Return every key that holds a value: {"context": ..., "run.steps": ..., ...}."""
    return dict(_walk(Config, ""))


def sections() -> list[str]:
    """Return the keys that hold other keys: ["run", "model", ...]."""
    return [name for name, field in Config.model_fields.items() if _is_section(field)]


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name that `word` was probably meant to be: one with the same last part, else one spelt alike."""
    names = list(names)
    same_end = [name for name in names if "." in name and name.rsplit(".", 1)[1] == word.rsplit(".", 1)[-1]]
    if len(same_end) == 1:
        return same_end[0]
    found = difflib.get_close_matches(word, names, n=1)
    return found[0] if found else None


def did_you_mean(word: str, names: Iterable[str], otherwise: str | None = None) -> str | None:
    """Return the hint for a mistyped `word`, or `otherwise` when nothing is near."""
    name = nearest(word, names)
    return f"did you mean {name}?" if name else otherwise


def _walk(section: type[Section], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        if _is_section(field):
            assert isinstance(field.annotation, type)
            yield from _walk(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, Section)
