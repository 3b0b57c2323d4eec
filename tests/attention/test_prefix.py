"""Slices of a sequence attend to the earlier ones, in any order of passes that a pipeline may run.

If these fail, what the model computes depends on where sequences were cut, or K,V stay in memory.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.attention.kernels.choice import choose
from engine.attention.prefix import Prefixes
from engine.attention.ring import attend
from tests.attention.rings import CPU, Case, Four, Placed, ThreadComm, dense, errors, rms, strict
from tests.attention.sliced import Interleaved, mixed
from tests.covering import covered

TOLERANCE = 1e-10
SHAPES = [(2, 1, 8), (4, 2, 4), (3, 3, 5)]  # H, G, D


def case_of(one: Interleaved, heads: int, groups: int, head_dim: int, dtype: torch.dtype = torch.float64) -> Case:
    return Case(one.sequences, one.world, heads, groups, head_dim, dtype, seed=one.seed)


def attended(one: Interleaved, case: Case) -> Four:
    """Return out, dq, dk, dv of all tokens, each rank a thread. Passes run in the order of `one`."""

    def run(rank: int, comm: ThreadComm) -> list[tuple[Tensor, Four]]:
        prefixes, running, found = Prefixes(), dict[int, tuple[Tensor, Four]](), list[tuple[Tensor, Four]]()
        kernel = strict(choose(CPU, case.dtype, case.head_dim))
        for place, forward in one.order:
            rows = one.rows(rank, place)
            q, k, v, dout = (x[rows] for x in case.inputs())
            if forward:
                inputs = tuple(x.requires_grad_() for x in (q, k, v))
                running[place] = attend(*inputs, one.layout(rank, place), comm, kernel, prefixes, layer=3), inputs
            else:
                out, inputs = running.pop(place)
                found.append((rows, (out.detach(), *torch.autograd.grad(out, inputs, dout))))
        assert len(prefixes) == 0, "K,V are kept after the last backward pass"
        return found

    parts = [part for of_rank in one.on_ranks(run) for part in of_rank]
    order = torch.cat([rows for rows, _ in parts])
    assert sorted(order.tolist()) == list(range(one.tokens)), "every token is on one rank"
    return tuple(torch.cat(x)[order.argsort()] for x in zip(*(four for _, four in parts), strict=True))


def check(one: Interleaved, shape: tuple[int, int, int]) -> None:
    case = case_of(one, *shape)
    found = errors(attended(one, case), dense(case))
    assert max(found.values()) < TOLERANCE, (one, found)


@covered("slices, degree, seed", [1, 2, 3, 7], [1, 2, 3, 4], range(len(SHAPES)))
def test_slices_between_other_micro_batches_are_dense_attention(slices: int, degree: int, seed: int) -> None:
    check(mixed(slices, degree, seed), SHAPES[seed])


@pytest.mark.parametrize("slices", [2, 3, 7])
def test_passes_of_others_come_between_those_of_a_sequence(slices: int) -> None:
    """In some orders backward passes come between the forward passes of a sequence, else the tests show too little."""
    found = 0
    for seed in range(len(SHAPES)):
        one = mixed(slices, 2, seed)
        for number in range(len(one.sequences)):
            own = {place for place, micro in enumerate(one.micros) if number in [sequence for sequence, _ in micro]}
            places = [at for at, done in enumerate(one.order) if done.forward and done.place in own]
            found += any(not done.forward for done in one.order[places[0] : places[-1]])
    assert found


@st.composite
def interleaved(draw: st.DrawFn) -> Interleaved:
    """Draw sequences on rings of any members, some in teams, cut into up to seven slices, in any order of passes."""
    world, sequences = draw(st.integers(1, 5)), []
    for _ in range(draw(st.integers(1, 4))):
        ring = tuple(draw(st.permutations(range(world)))[: draw(st.integers(1, world))])
        slices = tuple(draw(st.lists(st.integers(1, 30), min_size=1, max_size=7)))
        team = draw(st.sampled_from([size for size in range(1, len(ring) + 1) if len(ring) % size == 0]))
        sequences.append(Placed(sum(slices), ring, slices, team))
    return Interleaved(tuple(sequences), world, draw(st.integers(0, 999)))


@pytest.mark.parametrize("examples", [10, pytest.param(30, marks=pytest.mark.slow)])
def test_any_slices_in_any_order_are_dense_attention(examples: int) -> None:
    settings(max_examples=examples)(given(one=interleaved(), shape=st.sampled_from(SHAPES))(check))()


@pytest.mark.parametrize("slices", [2, 7])
def test_the_error_in_bf16_is_at_most_twice_that_of_one_call(slices: int) -> None:
    """It would be larger if the gradients of earlier slices were added in bf16."""
    length, ring = 997, (0, 1, 2)
    cut_ = (*[length // slices] * (slices - 1), length - length // slices * (slices - 1))
    one = Interleaved((Placed(length, ring, cut_),), 3)
    case = case_of(one, 2, 1, 32, torch.bfloat16)
    alone = replace(one, sequences=(Placed(length, (0,)),), world=1)
    exact = dense(case)
    found = rms(attended(one, case), exact)
    expected = rms(attended(alone, case_of(alone, 2, 1, 32, torch.bfloat16)), exact)
    assert all(value <= 2 * expected[name] for name, value in found.items()), (found, expected)


def kv(tokens: int, value: float = 1.0) -> tuple[Tensor, Tensor]:
    return torch.full((tokens, 1, 2), value), torch.full((tokens, 1, 2), -value)


def test_gradients_of_later_slices_are_added_in_the_wider_dtype() -> None:
    prefixes = Prefixes()
    for number in range(2):
        prefixes.put(5, 0, number, *(x.bfloat16() for x in kv(3)))
    for _ in range(2):
        prefixes.add(5, 0, [torch.full((2, 3, 1, 2), 0.3).bfloat16()])
    assert prefixes.take(5, 0, 1) is None, "no later slice attended to it"
    total = prefixes.take(5, 0, 0)
    assert total is not None and total.dtype == torch.float32
    assert torch.equal(total, 2 * torch.full((2, 3, 1, 2), 0.3).bfloat16().float()) and len(prefixes) == 0


def test_what_the_buffer_of_a_ring_holds_later_does_not_change_the_gradients() -> None:
    prefixes, gradient = Prefixes(), torch.ones(2, 3, 1, 2)
    prefixes.put(0, 0, 0, *kv(3))
    prefixes.add(0, 0, [gradient])
    gradient.fill_(9)
    total = prefixes.take(0, 0, 0)
    assert total is not None and (total == 1).all()


def test_recomputing_a_layer_puts_nothing_again() -> None:
    prefixes = Prefixes()
    for number in range(3):
        prefixes.put(5, 0, number, *kv(3, number))
    for number in (2, 1, 0):
        prefixes.put(5, 0, number, *kv(3, number))
        assert [one[0, 0, 0, 0].item() for one in prefixes.earlier(5, 0, number)] == list(range(number))
        prefixes.take(5, 0, number)
    assert len(prefixes) == 0


def test_sequences_and_layers_are_apart() -> None:
    prefixes = Prefixes()
    for sequence, layer in ((0, 0), (0, 1), (1, 0)):
        prefixes.put(sequence, layer, 0, *kv(3, 10 * sequence + layer))
    assert [prefixes.earlier(*at, 1)[0][0, 0, 0, 0].item() for at in ((0, 0), (0, 1), (1, 0))] == [0, 1, 10]
    prefixes.drop(0, 1)
    prefixes.drop(0, 1)
    assert len(prefixes) == 2


def test_clear_removes_what_a_step_that_failed_left() -> None:
    prefixes = Prefixes()
    prefixes.put(0, 0, 0, *kv(3))
    prefixes.totals(0).counts = 7
    prefixes.clear()
    assert len(prefixes) == 0 and prefixes.totals(0).counts == 0


def test_totals_go_with_the_first_slice() -> None:
    prefixes = Prefixes()
    for layer in range(2):
        prefixes.put(0, layer, 0, *kv(3))
    assert prefixes.totals(0) is prefixes.totals(0)
    for layer in (1, 0):
        prefixes.take(0, layer, 0)
    assert len(prefixes) == 0


def test_passes_in_another_order_are_refused() -> None:
    """Otherwise a query would attend to some of its keys only, or gradients would be lost."""
    prefixes = Prefixes()
    with pytest.raises(RuntimeError):
        prefixes.put(4, 0, 1, *kv(3))
    with pytest.raises(RuntimeError):
        prefixes.earlier(4, 0, 1)
    for number in range(2):
        prefixes.put(4, 0, number, *kv(3))
    with pytest.raises(RuntimeError):
        prefixes.take(4, 0, 0)
    with pytest.raises(RuntimeError):
        prefixes.add(4, 0, [torch.ones(2, 3, 1, 2)] * 3)
