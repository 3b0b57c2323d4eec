"""Tokens of documents, read where a rank needs them and nowhere else."""

from __future__ import annotations

from engine.config import schema
from engine.data.index import Index
from engine.data.source import open_source
from engine.data.tokenizer import encode
from engine.errors import DataError
from engine.planner.plan import Ints


class Reader:
    """Reads spans of the documents of an index. Documents are found by name, so files that were added do no harm."""

    def __init__(self, data: schema.Data, index: Index) -> None:
        self._source = open_source(data)
        self._index = index
        self._number = {name: number for number, name in enumerate(self._source.names)}

    def tokens(self, document: int, start: int, stop: int) -> Ints:
        """Return tokens start..stop of a document, int64[stop - start], 0 <= start < stop. Token 0 is BOS.

        Raises DataError when the document is gone or has become shorter than the index says.
        """
        size = int(self._index.lengths[document]) - 1  # bytes; byte b is token b + 1
        text = self._text(document, max(start - 1, 0), min(stop - 1, size))
        return encode(text, first=start == 0, last=stop == size + 2)

    def _text(self, document: int, start: int, stop: int) -> bytes:
        name = self._index.names[document]
        hint = "leave the documents as they are while a run lasts"
        if name not in self._number:
            raise DataError("is gone since the run began", key=name, hint=hint)
        number = self._number[name]
        text = self._source.read_span(number, start, stop)
        if len(text) != stop - start:
            message = "is shorter than when the run began"
            raise DataError(message, key=self._source.place(number), hint=hint)
        return text
