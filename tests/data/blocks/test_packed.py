from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.data.blocks.packed import Packed
from engine.data.token_file import TokenFile
from tests.data.memory import MemoryLengths
from tests.data.token_files import written


@given(counted=st.lists(st.lists(st.booleans(), max_size=5), max_size=8), data=st.data())
def test_runs_are_those_of_the_masks(
    tmp_path_factory: pytest.TempPathFactory, counted: list[list[bool]], data: st.DataObject
) -> None:
    """Of some documents of a token file, also of empty ones. A run does not go on in the next document."""
    prefix = written(tmp_path_factory.mktemp("runs") / "a", [[7] * len(one) for one in counted], masks=counted)
    first = data.draw(st.integers(0, len(counted)))
    last = data.draw(st.integers(first, len(counted)))
    found = Packed(TokenFile.open(prefix), None, first, last).runs()
    masks = [~np.array(one, dtype=np.bool_) for one in counted[first:last]]
    expected = MemoryLengths(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint64), masks).runs()
    assert found.tolist() == expected.tolist() and found.dtype == np.int64 and found.shape[1:] == (3,)
