"""Fixtures of the tests of blocks: a cache folder, and blocks that note when they are packed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.blocks.loading import TEXTS
from tests.data.noted import Noted


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def blocks(tmp_path: Path) -> list[Noted]:
    return [Noted.write(tmp_path / f"{number}", TEXTS) for number in range(6)]
