"""Lines about the documents of a source: the chosen field, files that were left out, and the unit of lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from engine.config import schema
from engine.config.sources import BUILT_IN
from engine.config.units import counted
from engine.data.sources.files import count_hidden, kind, split_glob
from engine.data.sources.rows import chosen_line
from engine.data.sources.source import Block
from engine.data.tokenizers.load import BYTES
from engine.errors import DataError

AS_BYTES = "warning: tokens are bytes, "  # how a line begins that is left out if the user has chosen bytes
_BYTES_VOCABULARY = 512  # of a model for bytes, with BOS, EOS and padding, at most


def notes(data: schema.Data, blocks: Sequence[Block], vocabulary: int | None = None) -> Iterator[str]:
    """Yield the lines about a source that was split into `blocks`; `vocabulary` is that of the model.

    They report the field that the shape of the documents determines, the number of hidden files that were left out, and
    that bytes are counted although the model has a larger vocabulary, for which the first document is read.
    """
    if line := chosen_line(blocks, data.field):
        yield line
    hidden = 0
    for path in data.paths if blocks else ():
        if path not in BUILT_IN:
            root, pattern = (path, data.pattern) if kind(path) == "folder" else split_glob(path)
            hidden += count_hidden(root, pattern) if pattern else 0
    if hidden:
        what = f"{counted(hidden, 'hidden file')} or folder{'s' if hidden > 1 else ''}"
        yield f"{data.place}: {what} left out; a data.pattern with the dot, such as '**/.*', reads them"
    if data.tokenizer == BYTES and vocabulary is not None and vocabulary > _BYTES_VOCABULARY and blocks:
        with suppress(DataError):  # it is reported when the documents are read
            first = next(blocks[0].documents(), None)
            if first is not None and first.text is not None:
                yield (
                    f"{AS_BYTES}but the model's vocabulary has {vocabulary:,}: its own tokenizer makes"
                    " about a quarter as many of a text; set data.tokenizer=FILE"
                )


def nothing_to_train(place: str, blocks: Sequence[Block], empty: int, broken: int = 0, dropped: int = 0) -> DataError:
    """Create the DataError for documents that are all unusable for training; `place` names them.

    `empty` of them have no token to predict, `broken` cannot be used, and a transform has `dropped` others. The first
    block is read to say why.
    """
    if dropped:
        message = f"its transform leaves out all of its documents ({dropped:,})"
        return DataError(
            message,
            key=place,
            hint="change the lengths of `drop`; `bytescale profile-data` shows those of "
            "the documents without a transform",
        )
    with suppress(DataError):
        for document in blocks[0].documents() if blocks and empty else ():
            if document.messages is not None or (document.ids is not None and len(document.ids) > 1):
                message = f"no token of its {counted(empty, 'document')} counts in the loss"
                hint = "set loss_mask to 1 for ids that count (the first one is not a label); see `bytescale data lint`"
                return DataError(message, key=place, hint=hint)
    if broken:
        message = f"none of its {counted(empty + broken, 'document')} can be used"
        return DataError(message, key=place, hint="`bytescale data lint` lists the faults of each")
    message = f"every document ({empty:,}) is empty" if empty else "contains no documents"
    return DataError(message, key=place, hint="set data.path to documents with text")
