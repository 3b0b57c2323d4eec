"""The benchmark of tokenizers, on a few texts."""

from __future__ import annotations

import pytest

from benchmarks.tokenizer_speed import BARE, compare
from tests.data.tokenizers.real_files import real_file

pytestmark = pytest.mark.long


def test_texts_with_the_librarys_ids_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    name = next(iter(BARE))
    if isinstance(found := real_file(name), str):
        pytest.skip(found)
    equal, rates = compare(name, ["a", "def f():\n    pass\n"], 1)
    assert equal == 2 and min(rates) > 0
    monkeypatch.setitem(BARE, name, lambda path: (lambda text: [0], len))
    assert compare(name, ["a", "b"], 1)[0] == 0
