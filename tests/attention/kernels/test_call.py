"""Each kernel against autograd of plain attention in float64: out, log-sum-exp, dq, dk, dv.

If these fail, so does everything above. Error of a tensor = max|a - b| / max|b|.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch

from engine.attention.kernels.call import Call, Kernel
from engine.attention.kernels.choice import choose
from engine.dtypes import wider
from tests.attention.rings import CPU, Four, attention, errors

KERNELS = ("fused_cpu", "reference")
GQA = [(1, 1), (4, 2), (6, 1), (3, 3)]  # H, G
LENGTHS = [1, 2, 7, 33, 100]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-6}

each_kernel = pytest.mark.parametrize("name", KERNELS)


def kernel(name: str, dtype: torch.dtype = torch.float64) -> Kernel:
    return choose(CPU, dtype, 8, name)


def call(q_lengths: list[int], kv_lengths: list[int], causal: bool) -> Call:
    return Call(*(tuple(accumulate(sizes, initial=0)) for sizes in (q_lengths, kv_lengths)), causal=causal)


def inputs(one: Call, heads: int, groups: int, dtype: torch.dtype = torch.float64, head_dim: int = 8) -> Four:
    """Return q, k, v and the output's gradient."""
    generator = torch.Generator().manual_seed(heads + 10 * one.q_bounds[-1])
    queries, keys = one.q_bounds[-1], one.kv_bounds[-1]
    shapes = [(queries, heads), (keys, groups), (keys, groups), (queries, heads)]
    return tuple(torch.randn(*s, head_dim, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)


def plain(one: Call, tensors: Four) -> Four:
    """Return out, dq, dk, dv of plain attention in float64."""
    q, k, v, dout = (x.double() for x in tensors)
    parts = [
        attention(q[rows], k[keys], v[keys], dout[rows], one.causal)
        for rows, keys in (
            (slice(*rows), slice(*keys))
            for rows, keys in zip(pairwise(one.q_bounds), pairwise(one.kv_bounds), strict=True)
        )
    ]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def run(found: Kernel, one: Call, tensors: Four) -> Four:
    """Return out, dq, dk, dv of the kernel."""
    q, k, v, dout = tensors
    out, lse = found.forward(q, k, v, one)
    return (out, *found.backward(dout, q, k, v, out, lse, one))


@each_kernel
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "groups"), GQA)
def test_packed_causal_sequences(name: str, heads: int, groups: int, dtype: torch.dtype) -> None:
    """bf16 comes back in float32, not rounded: blocks are merged before they are rounded."""
    one = call(LENGTHS, LENGTHS, causal=True)
    tensors = inputs(one, heads, groups, dtype)
    results = run(kernel(name, dtype), one, tensors)
    assert {x.dtype for x in results} == {wider(dtype)}
    assert max(errors(results, plain(one, tensors)).values()) < TOLERANCE[dtype]


@each_kernel
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "groups"), GQA)
def test_unequal_numbers_of_queries_and_keys(name: str, heads: int, groups: int, dtype: torch.dtype) -> None:
    one = call([3, 1, 40, 8, 1], [5, 1, 7, 90, 33], causal=False)
    tensors = inputs(one, heads, groups, dtype)
    results = run(kernel(name, dtype), one, tensors)
    assert max(errors(results, plain(one, tensors)).values()) < TOLERANCE[dtype]


@each_kernel
@pytest.mark.parametrize(
    "lengths",
    [([5, 5, 5], [5, 5, 5]), ([5, 5, 9, 9, 1, 5], [5, 5, 9, 9, 1, 5]), ([3, 3, 3, 7], [5, 5, 8, 8]), ([1, 1], [1, 1])],
)
def test_neighbours_of_one_length(name: str, lengths: tuple[list[int], list[int]]) -> None:
    """The CPU kernel takes them as one batch, which must not mix them."""
    one = call(*lengths, causal=lengths[0] == lengths[1])
    tensors = inputs(one, 4, 2)
    assert max(errors(run(kernel(name), one, tensors), plain(one, tensors)).values()) < TOLERANCE[torch.float64]


@each_kernel
def test_the_log_sum_exp_is_that_of_the_scaled_scores(name: str) -> None:
    one = call([6, 3], [9, 2], causal=False)
    q, k, v, _ = inputs(one, 2, 1)
    lse = kernel(name).forward(q, k, v, one)[1]
    scores = torch.einsum("thd,shd->ths", q, k.expand(-1, 2, -1)) / 8**0.5
    expected = torch.cat([scores[:6, :, :9].logsumexp(-1), scores[6:, :, 9:].logsumexp(-1)])
    assert lse.shape == (9, 2)
    torch.testing.assert_close(lse, expected, rtol=1e-13, atol=1e-13)


@each_kernel
@pytest.mark.parametrize(("heads", "groups"), GQA)
def test_gradients_of_a_part_of_the_keys_add_up_to_those_of_all(name: str, heads: int, groups: int) -> None:
    """The contract of `backward` that a ring stands on: out and lse are the merged ones, the keys only a part."""
    whole = call([20], [50], causal=False)
    q, k, v, dout = inputs(whole, heads, groups)
    found = kernel(name)
    out, lse = found.forward(q, k, v, whole)
    dq, dk, dv = torch.zeros_like(q), [], []
    for part in (slice(0, 1), slice(1, 18), slice(18, 50)):
        block = call([20], [part.stop - part.start], causal=False)
        share = found.backward(dout, q, k[part], v[part], out, lse, block)
        dq += share[0]
        dk.append(share[1])
        dv.append(share[2])
    results = (out, dq, torch.cat(dk), torch.cat(dv))
    assert max(errors(results, plain(whole, (q, k, v, dout))).values()) < TOLERANCE[torch.float64]


@each_kernel
def test_large_scores_do_not_overflow(name: str) -> None:
    one = call([30], [30], causal=True)
    q, k, v, dout = inputs(one, 2, 2)
    tensors = (40 * q, 40 * k, v, dout)
    assert (torch.einsum("thd,shd->hts", *tensors[:2]) / 8**0.5).max() > 1000, "exp would not overflow"
    assert max(errors(run(kernel(name), one, tensors), plain(one, tensors)).values()) < 1e-9


@each_kernel
@pytest.mark.parametrize("which", range(4))
def test_strided_tensors_give_the_same(name: str, which: int) -> None:
    """PyTorch's kernel reads heads of a stride other than 1 as if they were contiguous, and says nothing."""
    one = call([7, 5], [7, 5], causal=True)
    tensors = list(inputs(one, 4, 2))
    expected = run(kernel(name), one, tuple(tensors))
    tensors[which] = tensors[which].transpose(0, 2).contiguous().transpose(0, 2)
    for a, b in zip(run(kernel(name), one, tuple(tensors)), expected, strict=True):
        assert torch.equal(a, b)


@each_kernel
def test_no_sequence_is_no_result(name: str) -> None:
    one = Call((0,), (0,), causal=True)
    q, k = torch.zeros(0, 2, 8), torch.zeros(0, 1, 8)
    assert [x.shape for x in run(kernel(name), one, (q, k, k, q))] == [q.shape, q.shape, k.shape, k.shape]


def test_sums_are_kept_in_the_wider_dtype() -> None:
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    assert [wider(dtype) for dtype in dtypes] == [torch.float32] * 3 + [torch.float64]
