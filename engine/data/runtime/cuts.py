"""Planned sequences as bytes: all of them, or the cuts of hosts for which another host plans (planner/plan/cut.py)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.data.runtime.runtime import PlannedSequences
from engine.data.sequences import SequenceTable
from engine.planner.plan import cut
from engine.planner.plan.step_plan import StepPlan
from engine.units import Ints

_LOSS_TOKENS = 8  # bytes before a cut: the labels of all sequences that are not ignored


def to_bytes(table: SequenceTable, plan: StepPlan) -> bytes:
    """Serialise some sequences and their plan."""
    return _loss_tokens(table) + cut.to_bytes(plan, _columns(table))


def cuts_of(table: SequenceTable, plan: StepPlan, hosts: Sequence[Sequence[int]]) -> list[bytes]:
    """Serialise for each host what its HDP ranks, `hosts[i]`, need."""
    if not hosts:  # a run on one host
        return []
    loss_tokens = _loss_tokens(table)
    return [loss_tokens + one for one in cut.cuts(plan, hosts, _columns(table))]


def from_bytes(buffer: bytes) -> PlannedSequences:
    """Read what `to_bytes` or `cuts_of` has written."""
    plan, columns = cut.from_bytes(buffer[_LOSS_TOKENS:])
    source, block, document, start, ignored, content = columns
    length = plan.sequence_lengths if isinstance(plan, StepPlan) else plan.part.sequence_lengths
    table = SequenceTable(source, block, document, start, length, length - ignored, content.view(np.uint64))
    return PlannedSequences(table, plan, int.from_bytes(buffer[:_LOSS_TOKENS], "little"))


def _columns(table: SequenceTable) -> Ints:
    """Return the columns of a table that a plan does not have. Few labels are ignored, so these take no bytes."""
    ignored, content = table.length - table.loss_tokens, table.hash.view(np.int64)
    return np.stack([table.source, table.block, table.document, table.start, ignored, content])


def _loss_tokens(table: SequenceTable) -> bytes:
    return int(table.loss_tokens.sum()).to_bytes(_LOSS_TOKENS, "little")
