"""Reads all documents of a source."""

from __future__ import annotations

from engine.config import schema
from engine.data.sources.formats import FORMATS
from engine.data.sources.source import Document, usable


def documents(data: schema.Data) -> list[Document]:
    return [document for block in FORMATS[data.format].blocks(data) for document in usable(block)]


def texts(data: schema.Data) -> list[bytes | None]:
    return [document.text for document in documents(data)]
