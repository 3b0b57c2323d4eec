"""The schema is strict at every level, and the keys that others rely on are there."""

from __future__ import annotations

import pytest

from engine.config import keys
from engine.config.schema import Section

PROMISED = """
context capacity batch_tokens dtype recompute run.steps run.seed run.out optimizer.lr zero.stage
offload.ratio planner.mode lengths.path cluster.calibration
parallel.tp parallel.pp parallel.ep data.path data.runtime cluster.nodes cluster.ranks_per_node
"""


@pytest.mark.parametrize("section", [Section, *Section.__subclasses__()])
def test_sections_are_frozen_and_accept_no_unknown_key(section: type[Section]) -> None:
    assert section.model_config["frozen"] is True
    assert section.model_config["extra"] == "forbid"


def test_promised_keys() -> None:
    assert set(PROMISED.split()) <= set(keys.leaves())


def test_no_key_has_a_default() -> None:
    """A default in the schema would hide what no recipe says: the resolved text is the whole truth."""
    assert [key for key, field in keys.leaves().items() if not field.is_required()] == []
