from __future__ import annotations

import pytest

from benchmarks import choose
from tests.benchmarks.rows import measured

pytestmark = pytest.mark.long


def test_a_step_of_a_few_sequences_is_measured() -> None:
    found = measured(choose, "1", "8", "--sequences", "200", "--ranks", "64")["rows"]
    assert [row["sources"] for row in found] == [1, 8]
    for row in found:
        assert 100 < row["sequences"] < 400
        assert row["step"] >= max(row["choose"], row["plan"]) > 0
