"""The nearest name for one that is mistyped. Light: the command line needs it before anything else is imported."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name that `word` was probably meant to be: one with the same last part, else one spelt alike."""
    names = list(names)
    same_end = [name for name in names if "." in name and name.rsplit(".", 1)[1] == word.rsplit(".", 1)[-1]]
    if len(same_end) == 1:
        return same_end[0]
    found = difflib.get_close_matches(word, names, n=1)
    return found[0] if found else None


def did_you_mean(word: str, names: Iterable[str], otherwise: str | None = None) -> str | None:
    """Return the hint for a mistyped `word`, or `otherwise` when nothing is near.

    A word that several names begin with, keys of sections aside, means their family: llama3-8b-256k, llama3-8b-512k...
    """
    names = list(names)
    family = [name for name in names if name.startswith(word) and "." not in name]
    name = nearest(word, names)
    if len(family) > 1:
        name = f"{', '.join(family[:-1])} or {family[-1]}"
    return f"did you mean {name}?" if name else otherwise
