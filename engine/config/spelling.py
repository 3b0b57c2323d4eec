"""The nearest name for one that is mistyped. Light: the command line needs it before anything else is imported."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_ALIKE = 0.6  # difflib's own


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name that `word` was probably meant to be: one with the same last part, else one spelt alike."""
    names = list(names)
    same_end = [name for name in names if "." in name and name.rsplit(".", 1)[1] == word.rsplit(".", 1)[-1]]
    if len(same_end) == 1:
        return same_end[0]
    return max(_alike(word, names), default=None)


def _alike(word: str, names: Iterable[str]) -> list[str]:
    """Return the names that are spelt most alike, if any are alike enough: several where none is nearer.

    Of keys in the section of `word` only the last part counts: what they share tells none of them from the others.
    """
    word, section = word.lower(), word[: word.rfind(".") + 1].lower()
    matcher = difflib.SequenceMatcher()
    ratios = {}
    for name in names:
        shared = len(section) if name.lower().startswith(section) else 0
        matcher.set_seqs(name.lower()[shared:], word[shared:])
        ratios[name] = matcher.ratio()
    best = max(ratios.values(), default=0.0)
    return [name for name, ratio in ratios.items() if ratio == best >= _ALIKE]


def did_you_mean(word: str, names: Iterable[str], otherwise: str | None = None) -> str | None:
    """Return the hint for a mistyped `word`, or `otherwise` when nothing is near.

    A word that several names begin with, keys of sections aside, means their family: llama3-8b-256k, llama3-8b-512k...
    """
    names = list(names)
    family = [name for name in names if name.startswith(word) and "." not in name]
    name = nearest(word, names)
    alike = _alike(word, names)
    meant = family if len(family) > 1 else alike if name in alike else [name] if name else []
    if not meant:
        return otherwise
    return f"did you mean {' or '.join(filter(None, (', '.join(meant[:-1]), meant[-1])))}?"
