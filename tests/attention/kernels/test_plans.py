"""The rule by which cuDNN gets a shape: the time lost is less than twice that of the best decision in hindsight.

If these fail, a run stalls at each new shape, or never uses the faster kernel.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.kernels.plans import CudnnRun, Heads, PlanCosts, Plans, Run, Shape

RUN, HEADS = Run(1, 1000, 1000), Heads(2, 1, 64, torch.bfloat16)
SHAPE = Shape(RUN, False, False, HEADS)
SAVED_S = 1.0  # by each call of SHAPE


def plans(build_s: float, most_shapes: int = 100) -> Plans:
    return Plans(PlanCosts(build_s), most_shapes)


def calls_of(shape: Shape) -> CudnnRun:
    return CudnnRun(0, shape.run.sequences, shape, SAVED_S * shape.flops / SHAPE.flops)


ONE = calls_of(SHAPE)


def test_flops_are_those_of_the_products() -> None:
    assert SHAPE.flops == 2 * 2 * 1000 * 1000 * 2 * 64
    assert SHAPE._replace(causal=True).flops == SHAPE.flops / 2
    assert SHAPE._replace(backward=True).flops == 2.5 * SHAPE.flops
    assert SHAPE._replace(run=Run(3, 500, 1000), heads=HEADS._replace(kv=2)).flops == 1.5 * SHAPE.flops


def test_a_shape_pays_when_its_calls_would_have_saved_the_time_of_the_plan() -> None:
    """At the third call, which would begin to lose more than the plan costs."""
    asked = plans(2.5)
    assert [asked.use_cudnn(ONE) for _ in range(5)] == [False, False, True, True, True]


def test_a_plan_that_costs_nothing_is_built_at_once() -> None:
    assert plans(0.0).use_cudnn(ONE)


def test_everything_that_a_plan_is_built_for_is_counted_apart() -> None:
    asked = plans(1.5)
    others = [
        SHAPE._replace(run=Run(2, 500, 1000)),
        SHAPE._replace(run=RUN._replace(keys=999)),
        SHAPE._replace(run=RUN._replace(queries=999)),
        SHAPE._replace(causal=True),
        *(SHAPE._replace(heads=HEADS._replace(**change)) for change in ({"query": 1}, {"kv": 2}, {"size": 32})),
        SHAPE._replace(heads=HEADS._replace(dtype=torch.float16)),
    ]
    assert not any(asked.use_cudnn(calls_of(one)) for one in (SHAPE, *others))
    assert asked.use_cudnn(ONE)
    assert asked.use_cudnn(calls_of(SHAPE._replace(backward=True))), "2.5 s"


def test_each_thread_counts_for_itself() -> None:
    """PyTorch keeps cuDNN's plans per thread: one that the main thread built is built again in autograd's."""
    asked = plans(1.5)
    with ThreadPoolExecutor(1) as other:
        assert [asked.use_cudnn(ONE), asked.use_cudnn(ONE)] == [False, True]
        assert [other.submit(asked.use_cudnn, ONE).result() for _ in range(2)] == [False, True]


def test_the_shape_that_was_used_least_recently_is_forgotten() -> None:
    """Lengths of data never end; the table does."""
    asked = plans(1.5, most_shapes=2)
    small, smaller, smallest = (calls_of(SHAPE._replace(run=Run(1, 1, keys))) for keys in (1000, 100, 10))
    for one in (ONE, small, ONE, smaller, ONE):
        last = asked.use_cudnn(one)
    assert last, "in use"
    asked.use_cudnn(small)
    asked.use_cudnn(smallest)
    assert not asked.use_cudnn(ONE), "counted from the start again"


@given(calls=st.integers(0, 60), build_s=st.floats(0.01, 50))
def test_the_time_lost_is_less_than_twice_that_of_the_best_decision(calls: int, build_s: float) -> None:
    asked = plans(build_s)
    used = [asked.use_cudnn(ONE) for _ in range(calls)]
    lost = used.count(False) * SAVED_S + (build_s if any(used) else 0)
    assert lost <= 2 * min(calls * SAVED_S, build_s)
