"""Exact resume: new objects that begin with a saved state of a stage give what the stage gave after it.

Each stage has an adapter with two methods: `take` and `state`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from engine.data.quarantine import Quarantine
from engine.data.runtime.planner import StepPlanner, received_step
from engine.data.sequences import SequenceTable
from engine.data.steps import Cursor, Steps

Item = TypeVar("Item", covariant=True)


class Stage(Protocol[Item]):
    """Gives items one at a time."""

    def take(self) -> Item | None:
        """Return the next item, in values that `==` compares; None at the end."""
        ...

    def state(self) -> Any:
        """Return what a checkpoint keeps, as plain data."""
        ...


def resumes_exactly(begin: Callable[[Any | None], Stage[Item]], most: int, ahead: int = 2) -> list[Item]:
    """Assert that a stage continues identically from each of its states, and return its first `most` items.

    `begin(None)` makes a stage at its begin, `begin(state)` one that resumes. From the state before each item, through
    JSON, another stage gives the same item and `ahead` more, with the same states between them and the same end.
    """
    stage, states, items = begin(None), list[str](), list[Item | None]()
    while len(items) < most and None not in items[-1:]:
        states.append(_text(stage))
        items.append(stage.take())
    states.append(_text(stage))
    for first in range(len(items)):
        again = begin(json.loads(states[first]))
        for number in range(first, min(first + ahead + 1, len(items))):
            assert _text(again) == states[number], f"the state before item {number}, resumed at {first}"
            assert again.take() == items[number], f"item {number}, resumed at {first}"
            assert _text(again) == states[number + 1], f"the state after item {number}, resumed at {first}"
    return [item for item in items if item is not None]


def _text(stage: Stage[Any]) -> str:
    return json.dumps(stage.state(), sort_keys=True)


def columns(table: SequenceTable) -> list[list[int]]:
    """Return all columns of a table, in their order."""
    return [column.tolist() for column in vars(table).values()]


def cursor_of(state: Any | None) -> Cursor:
    return Cursor() if state is None else Cursor.of_json(state)


class StepsFrom:
    """The tables of steps, and why the run ends after each. Adapter of Steps, Mixer and sources."""

    def __init__(self, steps: Steps, state: Any | None) -> None:
        self.steps, self.cursor = steps, cursor_of(state)

    def state(self) -> Any:
        return self.cursor.to_json()

    def take(self) -> tuple[list[list[int]], str | None] | None:
        found = self.steps.next(self.cursor)
        if found is None:
            return None
        table, self.cursor = found
        return columns(table), self.steps.ended(self.cursor)


class ValidatedFrom(StepsFrom):
    """Steps, and the validation sets as they are after each of them."""

    def take(self) -> Any | None:
        step, sets = super().take(), self.steps.validation(self.cursor.order)
        return step and (step, {name: columns(table) for name, table in sets.items()})


class PlansFrom:
    """Planned steps, and the list of documents that were left out, as the first rank writes it.

    The list is part of the state: the file of a run that resumes is that of its last step.
    """

    def __init__(self, planner: StepPlanner, listed: Path, state: Any | None) -> None:
        cursor, lines = state or (None, "")
        listed.write_text(lines)
        self._planner, self._cursor = planner, cursor_of(cursor)
        self._listed, self._quarantine = listed, Quarantine(listed)

    def state(self) -> Any:
        return self._cursor.to_json(), self._listed.read_text()

    def take(self) -> Any | None:
        if self._planner.steps.ended(self._cursor) is not None:
            return None
        planned = received_step(self._planner.step(self._cursor))
        self._cursor = planned.after
        listed = self._quarantine.add(planned.after.step, planned.unusable)
        times = planned.balance, planned.step_s, planned.flops
        return columns(planned.table), planned.plan.digest, times, planned.ended, listed
