"""The layout of a page: a head, figures with captions, and tables, rendered with page.html."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment, StrictUndefined

from engine.report.headline import Headline
from engine.report.svg import NARROW, WIDE, Size, palette
from engine.report.words import Pair


@dataclass(frozen=True)
class Figure:
    """A picture as SVG text, for a wide page and for a narrow one. If both are empty, the caption says why.

    Two pictures that are `half` as wide as the page are next to each other. They have only one size, in `wide`.
    """

    title: str
    caption: str
    wide: str = ""
    narrow: str = ""
    half: bool = False

    @classmethod
    def of(cls, title: str, caption: str, picture: Callable[[Size], str], *, half: bool = False) -> Figure:
        """Draw a picture in its sizes: `picture` gets a size and returns an `<svg>` element."""
        return (
            cls(title, caption, picture(NARROW), "", half)
            if half
            else cls(title, caption, picture(WIDE), picture(NARROW))
        )


@dataclass(frozen=True)
class Table:
    """A table of text. The first cell of a row is its name; without `columns`, rows are pairs of name and value."""

    title: str
    rows: Sequence[Sequence[str]]
    columns: Sequence[str] = ()
    note: str = ""  # a line below the table that explains its terms
    text: bool = False  # whether cells are sentences, which wrap, and not figures, which do not


@dataclass(frozen=True)
class Page:
    """The contents of a page. `kind` is what it is, such as `a ByteScale run`; `head` is below the headline."""

    title: str
    kind: str
    headline: Headline
    head: Sequence[Pair]
    figures: Sequence[Figure]
    tables: Sequence[Table] = ()
    warning: str | None = None

    def html(self) -> str:
        """Render the page as self-contained HTML, without scripts and without links to other files or the network."""
        template = files("engine.report").joinpath("page.html").read_text(encoding="utf-8")
        environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        return environment.from_string(template).render(vars(self) | {"palette": palette()})
