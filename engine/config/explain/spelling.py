"""Finds the nearest name for a mistyped one. Imports nothing heavy: the command line needs it before anything else."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_MIN_RATIO = 0.6  # difflib's default cutoff
_TYPO = 0.9  # ratio of words that differ in about a letter
_NUMBER = re.compile(r"\d+")


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name that `word` probably means, or None if no name is similar.

    This is a key of the same section that differs in about a letter, else the only dotted key with the same last part
    (`lr` means `optimizer.lr`), else the most similar name.
    """
    names = list(names)
    section = word.rpartition(".")[0]
    in_section = _most_similar(word, [name for name in names if section and name.rpartition(".")[0] == section], _TYPO)
    if in_section:
        return max(in_section)
    same_end = [name for name in names if "." in name and name.rsplit(".", 1)[1] == word.rsplit(".", 1)[-1]]
    if len(same_end) == 1:
        return same_end[0]
    return max(_most_similar(word, names), default=None)


def _most_similar(word: str, names: Iterable[str], least: float = _MIN_RATIO) -> list[str]:
    """Return the names with the highest similarity, several if they tie; empty if none reaches the cutoff.

    Of those that tie, names with a number of `word` come alone: fp16 means bf16, not fp64.
    For keys in the same section as `word` the section is left out, because it would make all of them look similar.
    """
    word, section = word.lower(), word[: word.rfind(".") + 1].lower()
    matcher = difflib.SequenceMatcher()
    ratios = {}
    for name in names:
        start = len(section) if name.lower().startswith(section) else 0
        matcher.set_seqs(name.lower()[start:], word[start:])
        ratios[name] = matcher.ratio()
    best = max(ratios.values(), default=0.0)
    similar = [name for name, ratio in ratios.items() if ratio == best >= least]
    numbers = set(_NUMBER.findall(word))
    return [name for name in similar if numbers & set(_NUMBER.findall(name))] or similar


def did_you_mean(word: str, names: Iterable[str], otherwise: str | None = None) -> str | None:
    """Return the hint "did you mean ...?" for a mistyped `word`, or `otherwise` if no name is similar.

    If several names start with `word`, all are offered: llama3-8b means llama3-8b-256k, llama3-8b-512k and so on.
    """
    names = list(names)
    candidates = [name for name in names if name.startswith(word) and "." not in name]
    if len(candidates) < 2:
        name = nearest(word, names)
        similar = _most_similar(word, names)
        candidates = similar if name in similar else [name] if name else []
    if not candidates:
        return otherwise
    return f"did you mean {' or '.join(filter(None, (', '.join(candidates[:-1]), candidates[-1])))}?"
