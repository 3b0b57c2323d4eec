"""Fixtures of the tokenizer tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.tokenizers.real_files import python_texts, real_file


@pytest.fixture(scope="session")
def real() -> Callable[[str], Path]:
    """Give the file of a real tokenizer by name. Skips the test where there is no registry; CI must have one."""

    def find(name: str) -> Path:
        found = real_file(name)
        if isinstance(found, str):
            assert "CI" not in os.environ, found
            pytest.skip(found)
        return found

    return find


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """60 files of the standard library, and texts that tokenizers have got wrong."""
    odd = [
        "",
        " ",
        "\n",
        "\r\n \r",
        "a\0b",
        "\ufeffx",
        " \u00a0\u3000\x85y",
        "e\u0301 \u1e9b\u0323",
        "\U0001d518\U0001d52b\U0010ffff",
        "👩‍👩‍👧‍👦 ",
        "ﷺ",
        "\t\t  z",
    ]
    return python_texts(60) + odd
