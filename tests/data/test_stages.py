"""Compiled stages agree with what the steps of a run have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from engine.config.schema import Config, Segment, Source
from engine.data.scan import Documents
from engine.data.stages import compile_stages
from engine.data.steps import Cursor
from engine.errors import DataError
from tests.data.memory import Exhausted, Memory, config_of, steps_of
from tests.refusals import refused

BATCH = 2000


def corpora_of(sizes: Mapping[str, tuple[int, int]]) -> list[Memory]:
    """Sources of (documents, mean length), in blocks of 20 documents of many lengths."""
    random, found = np.random.default_rng(0), []
    for name, (documents, mean) in sizes.items():
        lengths = np.maximum(1, random.exponential(mean, documents)).astype(int).tolist()
        blocks = [lengths[at : at + 20] for at in range(0, documents, 20)]
        found.append(Memory(blocks, name, share=0.0))
    return found


def mixed(corpora: Sequence[Memory], mix: Sequence[Segment], policies: Mapping[str, Exhausted], steps: int) -> Config:
    config = config_of(BATCH, 256)
    sources = {one.name: Source(exhausted=policies[one.name]) for one in corpora}
    data = config.data.model_copy(update={"sources": sources, "mix": tuple(mix), "validation_share": 0.0})
    return config.model_copy(update={"data": data, "run": config.run.model_copy(update={"steps": steps})})


SEGMENTS = {
    "one": [Segment(weights={"a": 3, "b": 1, "c": 0.0})],
    "steps": [Segment(weights={"a": 3, "b": 1}), Segment(step=40, weights={"a": 0, "b": 1, "c": 2})],
    "tokens": [Segment(weights={"a": 3, "b": 1}), Segment(tokens=60_000, weights={"a": 0, "b": 1, "c": 2})],
    "linear": [
        Segment(weights={"a": 3, "b": 1}),
        Segment(step=40, weights={"b": 1, "c": 2}, schedule="linear"),
        Segment(step=60, weights={"b": 1}),
    ],
    "lengths": [
        Segment(weights={"a": 3, "b": 1}, lengths=(1, 150)),
        Segment(step=30, weights={"a": 0, "b": 1, "c": 2}, lengths=(1, 5000)),
        Segment(step=60, weights={"b": 1}, lengths=(100, 5000)),
    ],
    "cosine": [Segment(weights={"a": 3, "b": 1}), Segment(tokens=90_000, weights={"b": 1, "c": 2}, schedule="cosine")],
}


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("policy", ["repeat", "drop", "stop"])
def test_stages_are_those_of_a_run(segments: str, policy: Exhausted) -> None:
    """Tokens of each source in each segment, and the step at which one is used up: within a few documents."""
    corpora = corpora_of({"a": (400, 100), "b": (300, 200), "c": (2000, 40)})
    mix, policies = SEGMENTS[segments], {"a": policy, "b": "repeat", "c": "drop"}
    config = mixed(corpora, mix, policies, 80)  # type: ignore[arg-type]
    lengths = {one.name: np.array([size for block in one.sizes for size in block]) for one in corpora}
    compiled = compile_stages(config, {name: Documents(one) for name, one in lengths.items()})

    steps, cursor, begun = steps_of(corpora, config, mix, policies), Cursor(), dict[str, int]()  # type: ignore[arg-type]
    given = list[Counter[str]]()
    while cursor.step < 80 and (found := steps.next(cursor)) is not None:
        at = cursor.tokens if "tokens" in segments or segments == "cosine" else cursor.step
        number = max(number for number, one in enumerate(mix) if one.start <= at)
        given += [Counter() for _ in range(number + 1 - len(given))]
        table, cursor = found
        for source, tokens in zip(table.source.tolist(), table.length.tolist(), strict=True):
            given[number][corpora[source].name] += tokens
        for name, place in cursor.places.items():
            if place.epoch:
                begun.setdefault(name, cursor.step)
        for name in (cursor.mixer or {})["dropped"]:
            begun.setdefault(name, cursor.step)
    total = sum(sum(one.values()) for one in given)
    assert [one.segment for one in compiled.stages] == [number for number, one in enumerate(given) if one]
    for stage in compiled.stages:
        found_here = {one.source: one.tokens for one in stage.sources}
        for name in given[stage.segment]:
            assert abs(found_here.get(name, 0) - given[stage.segment][name]) <= 0.03 * total + 2000, (stage, given)
    assert abs(sum(one.tokens for one in compiled.stages) - total) <= 0.05 * total
    expected = {one.source: one.step for one in compiled.used_up}
    for name, step in begun.items():
        assert abs(expected[name] - step) <= 4, (expected, begun)
    assert (compiled.ended is not None) == (cursor.step < 80)
    if compiled.ended is not None:
        assert abs(compiled.ended.step - cursor.step) <= 4


def test_lengths_that_leave_a_segment_empty_and_documents_that_none_takes() -> None:
    """As a run refuses them; see test_walk.py."""
    corpora = corpora_of({"a": (400, 100)})
    found = {"a": Documents(np.array([5, 500]))}
    for mix in (
        [Segment(weights={"a": 1}, lengths=(6, 400)), Segment(weights={"a": 1}, step=3)],
        [Segment(weights={"a": 1}, lengths=(1, 400))],
    ):
        with refused(DataError):
            compile_stages(mixed(corpora, mix, {"a": "repeat"}, 10), found)


def test_epochs_and_the_longest_document_of_a_sample() -> None:
    """A sample stands for the whole source."""
    corpora = corpora_of({"a": (400, 100)})
    config = mixed(corpora, [Segment(weights={"a": 1})], {"a": "repeat"}, 100)
    lengths = np.array([size for block in corpora[0].sizes for size in block])
    whole = compile_stages(config, {"a": Documents(lengths)})
    part = compile_stages(config, {"a": Documents(lengths[::2], fraction=float(lengths[::2].sum() / lengths.sum()))})
    assert whole.epochs["a"] == pytest.approx(part.epochs["a"], rel=0.1)
    assert whole.epochs["a"] == pytest.approx(100 * BATCH / lengths.sum(), rel=0.1)
    assert whole.stages[0].longest == lengths.max()
