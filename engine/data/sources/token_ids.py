"""Documents of token ids, and the masks that determine which ids count in the loss.

Mask and id have the same index: an id that counts is predicted from those before it. `labels` are as in transformers,
where the model shifts them: -100, or the id itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from engine.data.sources.source import Document
from engine.errors import DataError
from engine.units import Ints

LOSS_MASK, _LABELS, _ATTENTION, _IGNORED = "loss_mask", "labels", "attention_mask", -100
# Optional masks of token ids. An id counts unless one of them excludes it.
MASKS = (LOSS_MASK, "assistant_masks", "assistant_mask", "completion_mask", "completion_masks", _LABELS, _ATTENTION)
_WRITE = {
    _LABELS: "write one value per id: -100 where it does not count, else the id itself",
    _ATTENTION: "write one value per id: 1, or 0 for padding",
}
_ONE_EACH = "write one value per id: 1 if it counts in the loss, else 0"


def token_document(place: str, row: Mapping[str, Any], field: str) -> Document:
    """Make a document of the token ids in `field` of a row, without padding, and of its masks.

    Raises DataError if they are not usable.
    """
    # All masks of the row apply: an id counts unless one of them excludes it.
    ids = _integers(place, row[field], field)
    counted: NDArray[np.bool_] | None = None
    kept = slice(None)
    for name in MASKS:
        if (given := row.get(name)) is None or name == field:
            continue
        values, hint = _integers(place, given, name), _WRITE.get(name, _ONE_EACH)
        if len(values) != len(ids):
            message = f"{name!r} has {len(values):,} values, but {field!r} has {len(ids):,}"
            raise DataError(message, key=place, hint=hint)
        if name == _LABELS:
            # Labels may exclude ids, but not replace them: a list shifted by one would otherwise seem to fit.
            counts = values != _IGNORED
            wrong = np.flatnonzero(counts & (values != ids))
            if len(wrong):
                at = int(wrong[0])
                message = f"{name!r} has {values[at]} at {at}, where {field!r} has {ids[at]}"
                raise DataError(message, key=place, hint=f"{hint}; not that of the next token")
        else:
            if not np.isin(values, (0, 1)).all():
                raise DataError(f"{name!r} contains values other than 0 and 1", key=place, hint=hint)
            counts = values.astype(np.bool_)
        # Zeros of the attention mask are padding, which is cut off. The other masks only exclude ids from the loss.
        if name != _ATTENTION:
            counted = counts if counted is None else counted & counts
            continue
        used = np.flatnonzero(counts)
        kept = slice(int(used[0]), int(used[-1]) + 1) if len(used) else slice(0)
        if not counts[kept].all():
            message = f"{name!r} is 0 at {int(used[0] + counts[kept].argmin())}, between ids where it is 1"
            raise DataError(message, key=place, hint="only padding at either end may be 0; write a loss_mask instead")
    ids = ids[kept]
    # Only labels may contain -100. Among the ids it would reach the embedding.
    if ids.size and ids.min() < 0:
        message = f"{field!r} contains {ids.min()}, which is not a token id"
        raise DataError(message, key=place, hint=f"exclude ids from the loss with a field {LOSS_MASK} of 0 and 1")
    return Document(place, None, ids, None if counted is None else counted[kept])


def _integers(place: str, values: ArrayLike, name: str) -> Ints:
    """Return a list of integers as int64 [n]. A mask may have booleans. Raises DataError if it is not one."""
    is_mask = name in MASKS
    try:
        array = np.asarray(values)
    except ValueError:  # lists of unequal lengths
        array = np.empty((0, 0))
    # numpy makes integers of a list of integers and booleans, and floats of one of small and large integers.
    types = (
        set(map(type, values)) if isinstance(values, list) else {type(one) for one in array.reshape(-1)[:1].tolist()}
    )
    if types == {int} and not np.can_cast(array.dtype, np.int64):
        largest = int(max(cast("Iterable[int]", values)))
        if largest > np.iinfo(np.int64).max:
            message = f"{name!r} contains {largest}, which is too large for a token id"
            raise DataError(message, key=place, hint="write ids below the size of the vocabulary")
    booleans = bool in types and (not is_mask or name == _LABELS)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "biu") or booleans:
        hint = _WRITE.get(name, _ONE_EACH) if is_mask else "set data.field to a text, or to lists of token ids"
        raise DataError(f"{name!r} is not a list of integers", key=place, hint=hint)
    return array.astype(np.int64)
