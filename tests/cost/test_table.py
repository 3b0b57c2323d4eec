"""The table of docs/memory.md is the one that is evaluated, and its sources exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from unittest.mock import patch

import pytest

from engine.config.load import load
from engine.cost import table
from engine.cost.activations import instants
from engine.cost.table import LETTERS, ROWS, letters, with_table
from tests.root import ROOT

PAGE = ROOT / "docs" / "memory.md"


def test_the_page_has_the_table_that_is_evaluated() -> None:
    """`python -m engine.cost.table docs/memory.md` writes it."""
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page


def test_every_letter_of_a_row_is_explained_and_has_a_value() -> None:
    values, explained = letters(load([])), set(re.findall(r"[A-Za-z_0-9]+", " ".join(LETTERS)))
    for row in ROWS:
        used = set(re.findall(r"\b[A-Za-z_]+\b", re.sub(r"'\w+'", "", f"{row.bytes} {row.when}")))
        names = used - {"max", "min", "and", "or", "not", "if", "else", "many", "True"}
        assert names <= set(values), row
        assert names <= explained | {"heads", "kv_heads", "head_dim", "tied"}, row


@pytest.mark.parametrize("source", sorted({row.source for row in ROWS}))
def test_sources_exist(source: str) -> None:
    """The function or tensor of a row stands in the file that the row names, of the installed DeepSpeed or PyTorch."""
    path, _, name = source.partition(": ")
    package, _, rest = path.partition("/")
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    place = Path(next(iter(spec.submodule_search_locations))) / rest
    assert place.exists()
    assert not name or re.search(rf"\b{name}\b", place.read_text(encoding="utf-8"))


def test_the_command_writes_the_table_between_its_markers() -> None:
    begin, end = table.MARKERS
    page = with_table(f"before\n{begin}\nold\n{end}\nafter\n")
    assert page.startswith("before\n") and page.endswith("\nafter\n") and "old" not in page
    assert page.count("\n### ") == len({row.instant for row in ROWS})


@pytest.mark.parametrize(("dtype", "copies"), [("bf16", 1), ("fp32", 0)])
def test_only_on_cpus_the_loss_copies_the_head_to_fp32(dtype: str, copies: int) -> None:
    config = load(["recipe=quickstart", f"dtype={dtype}"])
    _, *on_cpu = instants(config)
    with patch("engine.cost.table.uses_gpus", lambda config: True):
        _, *on_gpu = instants(config)
    head = 4 * config.model.hidden * config.model.vocab
    more = [cpu.fixed - gpu.fixed for cpu, gpu in zip(on_cpu, on_gpu, strict=True)]
    assert more == [copies * head, copies * head, 0, 0], "chunks of 1,024 tokens, larger ones, end, reduction"
