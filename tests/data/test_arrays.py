from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from engine.data.arrays import _START, _hash, from_bytes, to_bytes

DTYPES = ("<i4", "<i8", "<u8", "|u1", ">i4")
ARRAYS = st.dictionaries(
    st.text(max_size=5),
    st.sampled_from(DTYPES).flatmap(lambda dtype: arrays_of.arrays(dtype, arrays_of.array_shapes(min_side=0))),
    max_size=4,
)


@given(st.none() | st.dictionaries(st.text(), st.integers() | st.lists(st.text())), ARRAYS)
def test_the_head_and_the_arrays_come_back(head: Any, arrays: dict[str, np.ndarray]) -> None:
    found, others = from_bytes(memoryview(to_bytes(head, arrays)))
    assert found == head and list(others) == list(arrays)
    for name, array in arrays.items():
        assert np.array_equal(others[name], array) and others[name].shape == array.shape
        assert others[name].dtype == array.dtype.newbyteorder("<") and others[name].flags.aligned


def test_a_buffer_that_was_changed_is_refused() -> None:
    """Wherever: a bit of any byte, bytes that are missing or too many, none at all."""
    buffer = to_bytes({"step": 7}, {"tokens": np.arange(5, dtype=np.int32)})
    changed = [buffer[:at] + bytes([buffer[at] ^ 1]) + buffer[at + 1 :] for at in range(len(buffer))]
    for one in [*changed, *(buffer[:at] for at in range(len(buffer))), buffer + b"\0"]:
        with pytest.raises(ValueError):
            from_bytes(one)


@pytest.mark.parametrize("listed", [[["tokens", "<f8", [1]]], [["tokens", "|O", [1]]], [["tokens"]], 7, [7]])
def test_a_buffer_of_other_arrays_is_refused(listed: Any) -> None:
    """For example from a host of another version."""
    text = json.dumps([None, listed]).encode()
    content = text + b" " * (-len(text) % 8) + bytes(8)
    with pytest.raises(ValueError):
        from_bytes(_START.pack(len(content) - 8, _hash(content)) + content)
