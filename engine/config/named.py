"""Whether the user names documents, lengths, or both, on the command line or in a user recipe.

Packaged recipes for large models choose a mix of synthetic lengths (`lengths=github`), because no one has their
documents. Who names documents wants these to be planned, so naming them chooses `lengths=data`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from engine.config.own import OwnRecipe, separate
from engine.config.schema import Data

_DOCUMENTS = ("data.path", "data.sources", "data.mix", "data")  # data.tokenizer and others name no documents


class Named(NamedTuple):
    """The overrides (`data.path=a.jsonl`) or places (`mine.yaml:7`) that name documents and lengths, if any does."""

    documents: str | None
    lengths: str | None  # None if the documents come from an earlier layer than the lengths

    @property
    def implied(self) -> list[str]:
        """The override that naming documents stands for; none if lengths are named too."""
        return ["lengths=data"] if self.documents and not self.lengths else []

    @property
    def conflict(self) -> str | None:
        """A line that says which one is used if both are named, and lengths are not `data`; else None."""
        if not (self.documents and self.lengths):
            return None
        both = f"lengths are those of {self.lengths}, not of the documents of {self.documents}"
        return f"{both}; to use the documents, remove {self.lengths}"


def named(overrides: Sequence[str]) -> Named:
    """Return what these overrides of `load` name, or the user recipe that they choose."""
    others, own, _ = separate(overrides)
    return named_by(others, own)


def named_by(others: Sequence[str], own: Sequence[OwnRecipe]) -> Named:
    """Return what overrides and user recipes (`own.separate`) name.

    The command line comes before a file, and a file before those that it builds on.
    """
    documents = lengths = None
    for of_documents, of_lengths in _layers(others, own):
        if documents is None:
            documents, lengths = of_documents, lengths or of_lengths
    return Named(documents, lengths)


def names_path_alone(overrides: Sequence[str]) -> bool:
    """Return whether these overrides, or a user recipe, set `data.path`, and none of them a format."""
    others, own, _ = separate(overrides)
    keys = [text.partition("=")[0] for text in others]
    for recipe in own:
        entries = [entry for entry in recipe.values.get("defaults", []) if isinstance(entry, Mapping)]
        keys += [*(key for key in recipe.lines if key != "data"), *(key for entry in entries for key in entry)]
    return "data.path" in keys and not {"data", "data.format", "override /data"} & {*keys}


def names_tokenizer(overrides: Sequence[str]) -> bool:
    """Return whether these overrides of `load`, or a user recipe that they choose, set `data.tokenizer`."""
    others, own, _ = separate(overrides)
    return sets("data.tokenizer", others, own)


def path_without_effect(overrides: Sequence[str], data: Data) -> str | None:
    """Return a line that says so if these overrides, or a user recipe, set `data.path`, and no source reads it."""
    others, own, _ = separate(overrides)
    if not data.sources or not all(one.path for one in data.sources.values()) or not sets("data.path", others, own):
        return None
    return f"data.path has no effect: each source of data.sources has its own path ({', '.join(data.sources)})"


def sets(key: str, others: Sequence[str], own: Sequence[OwnRecipe]) -> bool:
    """Return whether overrides or user recipes (`own.separate`) set a key explicitly."""
    typed = (text.removeprefix("++").partition("=")[0] for text in others)
    return key in typed or any(key in recipe.lines for recipe in own)


def _layers(others: Sequence[str], own: Sequence[OwnRecipe]) -> Iterator[tuple[str | None, str | None]]:
    """Yield what names documents and what names lengths: of the command line, then of each file."""
    keys = {text.partition("=")[0]: text for text in others}
    yield _first(_DOCUMENTS, keys), _first(["lengths"], keys)
    for recipe in own:
        places = {key: f"{recipe.path}:{line}" for key, line in recipe.lines.items() if key != "data"}
        for entry in recipe.values.get("defaults", []):
            for key in entry if isinstance(entry, Mapping) else ():  # override /data: jsonl
                places[str(key).removeprefix("override /")] = places[str(key)]
        yield _first(_DOCUMENTS, places), _first(["lengths"], places)


def _first(names: Sequence[str], keys: Mapping[str, str]) -> str | None:
    """Return the value of the first key that equals a name or is below it; `data` matches only itself."""
    for name in names:
        for key, value in keys.items():
            if key == name or (name != "data" and key.startswith(f"{name}.")):
                return value
    return None
