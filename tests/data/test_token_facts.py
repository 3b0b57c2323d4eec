"""What PREFIX.json says is read back, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.data.token_facts import read_facts
from engine.errors import DataError


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 2}', '{"schema": 1, "documents": 3}', "\x00"])
def test_damaged_facts_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match="does not describe a token file of this version"):
        read_facts(tmp_path / "a")
    assert read_facts(tmp_path / "b") is None


# Single blocks
