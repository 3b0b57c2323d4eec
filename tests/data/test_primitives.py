"""The table of primitives in docs/data.md names keys that exist, and tests that exist."""

from __future__ import annotations

import re

from engine.config import keys
from tests.root import ROOT


def test_each_primitive_has_a_key_and_a_test() -> None:
    text = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    section = text.partition("### Declared orchestration")[2].partition("\n## ")[0]
    rows = [row.split("|")[1:-1] for row in section.splitlines() if row.startswith("|")][2:]
    assert len(rows) >= 7
    for primitive, key, test in rows:
        names = [name for name in re.findall(r"`([a-z.]+_?[a-z]*)`", key) if "." in name]
        assert set(names) <= keys.leaves().keys(), primitive
        found = re.fullmatch(r" `(tests/\S+\.py): (test_\w+)` ", test)
        assert found is not None, primitive
        assert f"\ndef {found[2]}(" in (ROOT / found[1]).read_text(encoding="utf-8"), primitive
