"""The page: a head, pictures with their sentences and tables, put into page.html. What stands in it others say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment, StrictUndefined

from engine.report.svg import NARROW, WIDE, Size
from engine.report.words import Pair


@dataclass(frozen=True)
class Figure:
    """A picture as SVG, for a wide page and for a narrow one, with its sentence; undrawn, the sentence says why."""

    title: str
    caption: str
    wide: str = ""
    narrow: str = ""

    @classmethod
    def of(cls, title: str, caption: str, picture: Callable[[Size], str]) -> Figure:
        """Return the figure of a picture that can be drawn in any size."""
        return cls(title, caption, picture(WIDE), picture(NARROW))


@dataclass(frozen=True)
class Table:
    """Rows of text, the first cell of each its name; without `columns` they are pairs of name and value."""

    title: str
    rows: Sequence[Sequence[str]]
    columns: Sequence[str] = ()


@dataclass(frozen=True)
class Page:
    """All that a page says. `kind` is the small line under its title, such as `a ByteScale run`."""

    title: str
    kind: str
    head: Sequence[Pair]
    figures: Sequence[Figure]
    tables: Sequence[Table] = ()
    warning: str | None = None

    def html(self) -> str:
        """Return the page as text that needs nothing else: no network, no other file, no script."""
        template = files("engine.report").joinpath("page.html").read_text(encoding="utf-8")
        environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        return environment.from_string(template).render(vars(self))
