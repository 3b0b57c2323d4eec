"""Lists the tags of an HTML page."""

from __future__ import annotations

from html.parser import HTMLParser


class Elements(HTMLParser):
    """Collects the tags of a page, and their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
