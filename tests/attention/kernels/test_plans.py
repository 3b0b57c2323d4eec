"""The rule by which cuDNN gets a shape: the time lost is less than twice that of the best decision in hindsight.

If these fail, a run stalls for half a second at each new shape, or never uses the faster kernel.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.kernels.plans import PlanCosts, Plans, Shape

SHAPE = Shape(False, 1, 1000, 1000, False, 2, 1, 64, torch.bfloat16)
SAVED_S = 1.0  # by each call of SHAPE
PER_FLOP = SAVED_S / SHAPE.flops


def plans(build_s: float, most_shapes: int = 100) -> Plans:
    return Plans(PlanCosts(build_s, PER_FLOP), most_shapes)


def test_flops_are_those_of_the_products() -> None:
    assert SHAPE.flops == 2 * 2 * 1000 * 1000 * 2 * 64
    assert SHAPE._replace(causal=True).flops == SHAPE.flops / 2
    assert SHAPE._replace(backward=True).flops == 2.5 * SHAPE.flops
    assert SHAPE._replace(sequences=3, queries=500, kv_heads=2).flops == 1.5 * SHAPE.flops


def test_a_shape_pays_when_its_calls_would_have_saved_the_time_of_the_plan() -> None:
    """At the third call, which would begin to lose more than the plan costs."""
    asked = plans(2.5)
    assert [asked.pay(SHAPE) for _ in range(5)] == [False, False, True, True, True]


def test_a_plan_that_costs_nothing_is_built_at_once() -> None:
    assert plans(0.0).pay(SHAPE)


def test_everything_that_a_plan_is_built_for_is_counted_apart() -> None:
    asked = plans(1.5)
    others = [
        SHAPE._replace(sequences=2, queries=500),
        SHAPE._replace(keys=999),
        SHAPE._replace(queries=999),
        SHAPE._replace(causal=True),
        SHAPE._replace(heads=1),
        SHAPE._replace(kv_heads=2),
        SHAPE._replace(head_dim=32),
        SHAPE._replace(dtype=torch.float16),
    ]
    assert not any(asked.pay(one) for one in (SHAPE, *others))
    assert asked.pay(SHAPE)
    assert asked.pay(SHAPE._replace(backward=True)), "2.5 s"


def test_each_thread_counts_for_itself() -> None:
    """PyTorch keeps cuDNN's plans per thread: one that the main thread built is built again in autograd's."""
    asked = plans(1.5)
    with ThreadPoolExecutor(1) as other:
        assert [asked.pay(SHAPE), asked.pay(SHAPE)] == [False, True]
        assert [other.submit(asked.pay, SHAPE).result() for _ in range(2)] == [False, True]


def test_the_shape_that_was_used_least_recently_is_forgotten() -> None:
    """Lengths of data never end; the table does."""
    asked, small = plans(1.5, most_shapes=2), SHAPE._replace(queries=1)
    for shape in (SHAPE, small, SHAPE, small._replace(keys=1), SHAPE):
        last = asked.pay(shape)
    assert last, "in use"
    asked.pay(small)
    asked.pay(small._replace(keys=2))
    assert not asked.pay(SHAPE), "counted from the start again"


@given(calls=st.integers(0, 60), build_s=st.floats(0.01, 50))
def test_the_time_lost_is_less_than_twice_that_of_the_best_decision(calls: int, build_s: float) -> None:
    asked = plans(build_s)
    used = [asked.pay(SHAPE) for _ in range(calls)]
    lost = used.count(False) * SAVED_S + (build_s if any(used) else 0)
    assert lost <= 2 * min(calls * SAVED_S, build_s)
