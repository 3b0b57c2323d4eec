"""Every stage of data continues identically from each state that it had, in objects that have kept nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.config.load import load
from engine.config.schema import Config, Segment
from engine.data import order
from engine.data.opening import list_blocks, open_run, open_sources
from engine.data.overview import Corpora
from engine.data.pack import pack
from engine.data.runtime.planner import StepPlanner
from engine.data.sources import jsonl
from engine.data.steps import Steps
from engine.job import Job
from engine.launch.prepare import write_facts
from engine.run.folder import RunFolder
from tests.data.memory import Memory, config_of, steps_of
from tests.data.resuming import PlansFrom, Stage, StepsFrom, ValidatedFrom, resumes_exactly

Begin = Callable[[Any | None], Stage[Any]]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several windows of a few small blocks."""
    monkeypatch.setattr(jsonl, "_BLOCK_BYTES", 300)
    monkeypatch.setattr(order, "WINDOW_BYTES", 1500)


def memory(name: str, blocks: int, lengths: Sequence[int] = (10, 10, 10), **facts: Any) -> Memory:
    return Memory([lengths] * blocks, name, bytes_=400, **facts)


def dropped(folder: Path) -> Begin:
    """A source is used up, and a later segment gives it a larger weight."""
    mix = [Segment(weights={"a": 1, "b": 1}), Segment(step=4, weights={"a": 9, "b": 1})]
    policies: Any = {"a": "drop", "b": "repeat"}
    return lambda state: StepsFrom(steps_of([memory("a", 1), memory("b", 17)], config_of(40, 10), mix, policies), state)


def stopped(folder: Path) -> Begin:
    """The run ends with a source, while the other repeats its documents, of which some are split between steps."""
    policies: Any = {"a": "stop", "b": "repeat"}
    corpora = [memory("a", 9), memory("b", 2, lengths=(10, 130, 10))]
    return lambda state: StepsFrom(steps_of(corpora, config_of(45, 7, long="split"), {"a": 2, "b": 1}, policies), state)


def validated(folder: Path) -> Begin:
    """Validation sets do not depend on the steps before, nor steps on the sets."""
    corpora = [memory("a", 12, validation=range(0, 30, 4)), memory("c", 9, share=1.0)]
    return lambda state: ValidatedFrom(steps_of(corpora, config_of(70, 9, validation_tokens=120), {"a": 1}), state)


def texts(folder: Path) -> Config:
    """Two sources of texts, rows with masks and a token file. Some documents are empty or cannot be used."""
    for name, every in (("web", 7), ("code", 11)):
        lines = ["{" if at % every == 0 else json.dumps({"text": f"{at} " * (at * every % 9)}) for at in range(120)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    masks = [{"ids": [*range(length)], "loss_mask": [0, *(length - 1) * [1]]} for length in range(3, 33)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, masks)))
    packed = load(["data=jsonl", f"data.path={folder / 'web.jsonl'}", "data.quarantine_after=3"])
    pack(packed.data, folder / "packed", workers=1)
    paths = {"web": "web.jsonl", "code": "code.jsonl", "rows": "rows.jsonl", "packed": "packed"}
    sources = [f"data.sources.{name}.path={folder / path}" for name, path in paths.items()]
    sources += ["data.sources.rows.field=ids", "data.sources.packed.format=tokens", f"data.cache={folder / 'cache'}"]
    weights = ["{web: 3, code: 1, rows: 1, packed: 1}", "{web: 1, code: 2, rows: 1, packed: 1}"]
    mix = f"data.mix=[{{weights: {weights[0]}}}, {{step: 7, weights: {weights[1]}, schedule: cosine}}]"
    sizes = ["batch_tokens=80", "context=16", "capacity=16", "data.validation_share=0.2", "data.quarantine_after=3"]
    return load(["recipe=quickstart", "data=jsonl", mix, *sources, *sizes])


def mixture(folder: Path) -> Begin:
    """All that a run opens, in new objects: blocks are listed and sources opened again."""
    config = texts(folder)
    return lambda state: StepsFrom(Corpora(config).steps, state)


def without_cache(folder: Path) -> Begin:
    """A document that was left out is part of the order: it is left out again where nothing is packed."""
    config = texts(folder)

    def begin(state: Any | None) -> StepsFrom:
        shutil.rmtree(folder / "cache", ignore_errors=True)
        return StepsFrom(Corpora(config).steps, state)

    return begin


def planned(folder: Path) -> Begin:
    """What a planning process answers, and the documents that the run lists as left out."""
    config = texts(folder)

    def begin(state: Any | None) -> PlansFrom:
        planner = StepPlanner(open_sources(config.data, list_blocks(config.data)), Job(config))
        return PlansFrom(planner, folder / "quarantine.jsonl", state)

    return begin


def listed_blocks(folder: Path) -> Begin:
    """A run that resumes reads the blocks that the launcher has listed, and those are the ones that it would list."""
    config, run = texts(folder), RunFolder(folder / "run")
    run.root.mkdir()
    write_facts(run, config, Corpora(config), 0)

    def begin(state: Any | None) -> StepsFrom:
        found = open_run(run, config) if state is not None else open_sources(config.data, list_blocks(config.data))
        return StepsFrom(Steps(found.corpora, config), state)

    return begin


STAGES: dict[Callable[[Path], Begin], int] = {
    dropped: 8,
    stopped: 99,  # more than there are
    validated: 12,
    mixture: 14,
    without_cache: 5,
    planned: 6,
    listed_blocks: 5,
}


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
def test_each_stage_continues_identically(stage: Callable[[Path], Begin], tmp_path: Path) -> None:
    items = resumes_exactly(stage(tmp_path), STAGES[stage])
    assert len(items) == STAGES[stage] or (stage is stopped and 8 < len(items) < 99)
    assert len(set(map(repr, items))) >= 5, "items that differ from each other"
    assert stage is not planned or items[-1][-1] > 3, "documents were left out"


class Numbers:
    """Gives numbers; keeps the next one, or half of what it needs, or nothing at all."""

    def __init__(self, state: Any | None, kept: str) -> None:
        self._next, self._kept, self._taken = (state or {"next": 0})["next"], kept, 0

    def state(self) -> Any:
        kept = {"all": self._next, "half": self._next // 2 * 2, "nothing": 0}
        return {"next": kept.get(self._kept, self._next), **({"taken": self._taken} if self._kept == "time" else {})}

    def take(self) -> int | None:
        if self._next == 7 or (self._kept == "ends" and self._taken == 2):
            return None
        self._next, self._taken = self._next + 1, self._taken + 1
        return self._next


def test_a_stage_that_keeps_what_it_needs() -> None:
    assert resumes_exactly(lambda state: Numbers(state, "all"), 99) == [1, 2, 3, 4, 5, 6, 7]
    assert resumes_exactly(lambda state: Numbers(state, "all"), 3) == [1, 2, 3]


@pytest.mark.parametrize("kept", ["half", "nothing", "time", "ends"])
def test_a_stage_that_does_not_fails(kept: str) -> None:
    """Items, states between them and ends are compared."""
    with pytest.raises(AssertionError, match="resumed at"):
        resumes_exactly(lambda state: Numbers(state, kept), 99)


def test_a_stage_that_keeps_something_elsewhere_fails() -> None:
    """For example in a class, a file or a source."""
    numbers = count()

    class Elsewhere:
        def state(self) -> Any:
            return None

        def take(self) -> int:
            return next(numbers)

    with pytest.raises(AssertionError, match="item 0, resumed at 0"):
        resumes_exactly(lambda state: Elsewhere(), 3)


def test_the_state_is_plain_data() -> None:
    class Arrays(Numbers):
        def state(self) -> Any:
            return np.int64(super().state()["next"])

    with pytest.raises(TypeError):
        resumes_exactly(lambda state: Arrays(None, "all"), 3)
