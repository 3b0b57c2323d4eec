"""Values of all ranks are combined once, in whatever order messages arrive, and only when all ranks have joined."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.control.reduction import FAN_OUT, GATHER, MAX, MIXED, Operation, Reduction, children, combine

NUMBERS = st.integers() | st.floats(allow_nan=False)


class Collective(NamedTuple):
    """What each rank gives to an operation, and the result."""

    kind: str
    values: list[Any]
    expected: Any


@st.composite
def collectives(draw: st.DrawFn, ranks: int) -> Collective:
    if draw(st.booleans()):
        size = draw(st.integers(0, 3))
        lists = [draw(st.lists(NUMBERS, min_size=size, max_size=size)) for _ in range(ranks)]
        return Collective(MAX, lists, [max(of_one) for of_one in zip(*lists, strict=True)])
    given = [draw(st.none() | st.text()) for _ in range(ranks)]
    parts = [{} if value is None else {str(rank): value} for rank, value in enumerate(given)]
    return Collective(GATHER, parts, {str(rank): value for rank, value in enumerate(given) if value is not None})


class Tree:
    """Agents whose messages are delivered one by one. Ranks are members of the nodes that `node_of` says."""

    def __init__(self, parents: Sequence[int], node_of: Sequence[int]) -> None:
        """`parents` has the parent of each node but the first."""
        self.parents, self.node_of = [-1, *parents], node_of
        members = [self.parents.count(node) + list(node_of).count(node) for node in range(len(self.parents))]
        self.nodes = [Reduction[tuple[str, int]](count) for count in members]
        # From and to whom messages are on their way; those of one pair of ends stay in order.
        self.ways = dict[tuple[tuple[str, int], tuple[str, int]], deque[tuple[str, Operation]]]()
        self.results: list[list[Operation]] = [[] for _ in node_of]

    def send(self, source: tuple[str, int], target: tuple[str, int], what: str, operation: Operation) -> None:
        self.ways.setdefault((source, target), deque()).append((what, operation))

    def join(self, rank: int, operation: Operation) -> None:
        self.send(("rank", rank), ("node", self.node_of[rank]), "reduce", operation)

    def deliver(self, data: st.DataObject) -> None:
        """Deliver all messages, each time the next of any way."""
        while ways := [way for way, waiting in self.ways.items() if waiting]:
            source, target = data.draw(st.sampled_from(ways))
            what, operation = self.ways[source, target].popleft()
            kind, number = target
            if kind == "rank":
                self.results[number].append(operation)
                continue
            if what == "reduce":
                whole = self.nodes[number].add(source, operation)
                if whole is None:
                    continue
                if number:
                    self.send(target, ("node", self.parents[number]), "reduce", whole)
                    continue
                operation = whole
            for member in self.nodes[number].answered(operation.name):
                self.send(target, member, "result", operation)


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    parents = [draw(st.integers(0, node)) for node in range(draw(st.integers(0, 5)))]
    leaves = set(range(len(parents) + 1)) - set(parents)
    more = draw(st.lists(st.integers(0, len(parents)), max_size=4))
    return Tree(parents, draw(st.permutations([*leaves, *more])))


@given(trees(), st.data())
def test_every_rank_gets_what_all_values_make_whatever_arrives_first(tree: Tree, data: st.DataObject) -> None:
    """Also with several operations in flight, which ranks join in different orders."""
    ranks = len(tree.node_of)
    drawn = [data.draw(collectives(ranks)) for _ in range(data.draw(st.integers(1, 3)))]
    for rank in range(ranks):
        for number in data.draw(st.permutations(range(len(drawn)))):
            tree.join(rank, Operation(str(number), drawn[number].kind, drawn[number].values[rank]))
    tree.deliver(data)
    expected = sorted(Operation(str(number), one.kind, one.expected) for number, one in enumerate(drawn))
    assert [sorted(found) for found in tree.results] == [expected] * ranks
    assert not any(node._open for node in tree.nodes), "nothing is kept of an operation that is answered"


@given(trees(), st.data())
def test_nobody_is_answered_before_all_ranks_have_joined(tree: Tree, data: st.DataObject) -> None:
    """A rank that is late, or gone, is never left out. Other operations go on."""
    ranks = len(tree.node_of)
    late = data.draw(st.integers(0, ranks - 1))
    for rank in range(ranks):
        tree.join(rank, Operation("other", MAX, [0]))
        if rank != late:
            tree.join(rank, Operation("it", MAX, [rank]))
    tree.deliver(data)
    assert tree.results == [[Operation("other", MAX, [0])]] * ranks
    tree.join(late, Operation("it", MAX, [late]))
    tree.deliver(data)
    assert [found[1:] for found in tree.results] == [[Operation("it", MAX, [ranks - 1])]] * ranks


@given(st.lists(st.sampled_from([[MAX, [1.0]], [MAX, [2.0, 3.0]], [GATHER, {"0": 1}], [GATHER, {}]]), min_size=1))
def test_ranks_that_call_different_collectives_find_out(calls: list[list[Any]]) -> None:
    """Control compares the kind and the length of the result with its own."""
    combined = Operation("it", *calls[0])
    for call in calls[1:]:
        combined = combine(combined, Operation("it", *call))
    kinds = {kind for kind, _ in calls}
    if len(kinds) > 1:
        assert combined == Operation("it", MIXED, sorted(kinds))
    elif kinds == {MAX}:
        assert len(combined.value) == min(len(value) for _, value in calls)


def test_nan_is_the_maximum_in_any_order() -> None:
    """It must not depend on the order whether ranks see it."""
    for ones, others in (([math.nan], [1.0]), ([1.0], [math.nan]), ([math.nan], [math.nan])):
        assert math.isnan(combine(Operation("it", MAX, ones), Operation("it", MAX, others)).value[0])


def test_a_member_that_joins_twice_is_an_error() -> None:
    reduction = Reduction[int](2)
    reduction.add(0, Operation("it", MAX, [1]))
    with pytest.raises(ValueError):
        reduction.add(0, Operation("it", MAX, [1]))


@given(st.integers(1, 3000))
def test_each_node_has_one_parent_and_few_children(nodes: int) -> None:
    """The first is the root of all."""
    families = {node: children(node, nodes) for node in range(nodes)}
    assert sorted(child for found in families.values() for child in found) == list(range(1, nodes))
    assert max(map(len, families.values())) <= FAN_OUT
    assert all(child > node for node, found in families.items() for child in found)
