"""Values that the design names and that are not built yet: refused with a sentence of their own, not as mistakes."""

from __future__ import annotations

from engine.errors import Problem

_VALUES: dict[str, tuple[object, ...]] = {"data.runtime": ("ray",)}


def not_built(key: str, value: object, available: str) -> Problem | None:
    """Return the refusal of a value that will exist one day, or None if it never will."""
    if not _is_planned(key.removesuffix(".name"), value):
        return None
    return Problem(f"{value} is not built yet", key, f"available: {available}")


def _is_planned(key: str, value: object) -> bool:
    if isinstance(value, bool):
        return False
    if key == "parallel.ep":
        return isinstance(value, int) and value > 1
    return value in _VALUES.get(key, ())
