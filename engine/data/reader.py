"""Reads the tokens of documents, on the rank that needs them."""

from __future__ import annotations

from engine.config import schema
from engine.data.index import Index
from engine.data.sources.formats import open_source
from engine.data.tokenizer import encode
from engine.errors import DataError
from engine.units import Ints


class Reader:
    """Reads tokens of the documents of an index. Documents are found by name, so files may be added later."""

    def __init__(self, data: schema.Data, index: Index) -> None:
        self._source = open_source(data)
        self._index = index
        self._number = {name: number for number, name in enumerate(self._source.names)}

    def tokens(self, document: int, start: int, stop: int) -> Ints:
        """Read tokens start .. stop - 1 of a document: int64 [stop - start]. Token 0 is BOS.

        `document` is the number in the index. Raises DataError if the document was removed, or is shorter than its
        length in the index.
        """
        size = int(self._index.lengths[document]) - 1  # bytes; byte b is token b + 1
        first, last = max(start - 1, 0), min(stop - 1, size)
        name, hint = self._index.names[document], "do not change the documents during a run"
        if name not in self._number:
            raise DataError("was removed after the run started", key=name, hint=hint)
        number = self._number[name]
        text = self._source.read_span(number, first, last)
        if len(text) != last - first:
            message = "is shorter than at the start of the run"
            raise DataError(message, key=self._source.place(number), hint=hint)
        return encode(text, first=start == 0, last=stop == size + 2)
