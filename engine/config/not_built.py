"""Values that this version does not support yet. The errors say so, because the values are not typing mistakes."""

from __future__ import annotations

from engine.errors import Problem


def not_built(key: str, value: object, available: str) -> Problem | None:
    """Return the problem with a value that only a later version will accept; None for any other value.

    `available` lists the values that can be chosen today.
    """
    key_or_group = key.removesuffix(".name")
    if (key_or_group, value) == ("data.runtime", "ray"):
        return Problem(f"{value} is not implemented yet", key, f"available: {available}")
    return None
