"""Reads all documents of a source."""

from __future__ import annotations

from engine.config import schema
from engine.data.sources.formats import FORMATS
from engine.data.sources.source import Document, usable


def documents(data: schema.Data) -> list[Document]:
    found = [document for block in FORMATS[data.format].blocks(data) for document in usable(block)]
    assert all(map(is_one_thing, found))
    return found


def is_one_thing(document: Document) -> bool:
    """Whether it is a text, ids, a chat, or a problem, and nothing else."""
    kinds = document.text, document.ids, document.messages, document.problem
    return sum(kind is not None for kind in kinds) == 1


def texts(data: schema.Data) -> list[bytes | None]:
    return [document.text for document in documents(data)]
