"""docs/reference/ agrees with the schema and with the commands. If not: `python -m bytescale_cli.reference`."""

from __future__ import annotations

import pytest

from bytescale_cli.reference import FOLDER, PAGES
from engine.config import keys
from tests.bytescale_cli.commands import commands


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_program_writes(name: str) -> None:
    assert (FOLDER / name).read_text() == PAGES[name]()


def test_every_key_has_a_row() -> None:
    page = (FOLDER / "keys.md").read_text()
    assert all(f"| `{key}` |" in page for key in keys.leaves())


def test_every_command_has_a_section() -> None:
    page = (FOLDER / "commands.md").read_text()
    assert all(f"## bytescale {name}\n" in page for name in commands())
