"""Each kernel that this GPU has, against float64: forward, log-sum-exp, gradients, and as blocks of a ring.

Run with `pytest -m gpu tests/attention`. A kernel that is not installed or not for this GPU is skipped by name; one
that is installed but broken fails.
"""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from engine.attention.kernels import choice, reference
from engine.attention.kernels.call import Call, Kernel
from engine.attention.kernels.choice import choose
from engine.close import error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GPU = torch.device("cuda", 0)
LENGTHS = [1, 2, 7, 64, 129, 640, 1000]
GPU_KERNELS = [name for name in choice.KERNELS if name != "fused_cpu"]
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3}  # max|a - b| / max|b|


@pytest.fixture(params=[(name, dtype) for name in GPU_KERNELS for dtype in TOLERANCE], ids=str)
def kernel(request: pytest.FixtureRequest) -> tuple[Kernel, torch.dtype]:
    name, dtype = request.param
    choose.cache_clear()
    try:
        found = choose(GPU, dtype, 128, name)
    except ValueError as error:
        if "broken" in str(error):
            raise
        pytest.skip(str(error))
    return found, dtype


def call(q_lengths: list[int], kv_lengths: list[int], causal: bool) -> Call:
    return Call(*(tuple(accumulate(sizes, initial=0)) for sizes in (q_lengths, kv_lengths)), causal=causal)


def inputs(one: Call, dtype: torch.dtype, heads: int = 8, groups: int = 2) -> tuple[Tensor, ...]:
    """Return q, k, v and the output's gradient."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(one.q_bounds[-1], heads), *[(one.kv_bounds[-1], groups)] * 2, (one.q_bounds[-1], heads)]
    return tuple(torch.randn(*shape, 128, generator=generator).to(GPU, dtype) for shape in shapes)


def five(found: Kernel, one: Call, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    q, k, v, dout = tensors
    out, lse = found.forward(q, k, v, one)
    return out, lse, *found.backward(dout, q, k, v, out, lse, one)


def exact(one: Call, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return five(choose(GPU, torch.float64, 128, "reference"), one, tuple(x.double() for x in tensors))


def check(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float, least: float = 0.0) -> None:
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), found, expected, strict=True):
        off = error(a, b, least)
        assert off < tolerance, (name, off)


@pytest.mark.parametrize(("heads", "groups"), [(8, 2), (4, 4), (6, 1)])
def test_packed_causal_sequences(kernel: tuple[Kernel, torch.dtype], heads: int, groups: int) -> None:
    found, dtype = kernel
    one = call(LENGTHS, LENGTHS, causal=True)
    tensors = inputs(one, dtype, heads, groups)
    check(five(found, one, tensors), exact(one, tensors), TOLERANCE[dtype])


@pytest.mark.parametrize("lengths", [[1000], [256] * 8, [1] * 3])
def test_sequences_of_one_length(kernel: tuple[Kernel, torch.dtype], lengths: list[int]) -> None:
    found, dtype = kernel
    one = call(lengths, lengths, causal=True)
    tensors = inputs(one, dtype)
    # With one key, the gradients of q and k are 0 up to the rounding of terms of about 1.
    least = 1.0 if max(lengths) == 1 else 0.0
    check(five(found, one, tensors), exact(one, tensors), TOLERANCE[dtype], least)


@pytest.mark.parametrize(
    "lengths",
    [([3, 1, 400, 8, 1], [5, 1, 70, 900, 333]), ([300], [777]), ([64, 64], [9, 9]), ([1, 1], [300, 300]), ([1], [64])],
)
def test_unequal_numbers_of_queries_and_keys(
    kernel: tuple[Kernel, torch.dtype], lengths: tuple[list[int], list[int]]
) -> None:
    found, dtype = kernel
    one = call(*lengths, causal=False)
    tensors = inputs(one, dtype)
    check(five(found, one, tensors), exact(one, tensors), TOLERANCE[dtype])


def test_gradients_of_a_part_of_the_keys_add_up_to_those_of_all(kernel: tuple[Kernel, torch.dtype]) -> None:
    """What a ring stands on: out and lse are the merged ones, the keys only a part."""
    found, dtype = kernel
    whole = call([200], [500], causal=False)
    q, k, v, dout = inputs(whole, dtype)
    expected = exact(whole, (q, k, v, dout))
    out, lse = found.forward(q, k, v, whole)
    dq, dk, dv = torch.zeros_like(q, dtype=torch.float32), [], []
    for part in (slice(0, 1), slice(1, 180), slice(180, 500)):
        share = found.backward(dout, q, k[part], v[part], out, lse, call([200], [part.stop - part.start], causal=False))
        dq += share[0]
        dk.append(share[1])
        dv.append(share[2])
    check((out, lse, dq, torch.cat(dk), torch.cat(dv)), expected, TOLERANCE[dtype])


def test_the_chosen_kernel_is_no_reference_and_none_is_broken() -> None:
    choose.cache_clear()
    found = choose(GPU, torch.bfloat16, 128)
    assert found.name != "reference", found.rejected
    assert not [line for line in found.rejected if "broken" in line]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # it says of itself that it may miss some
def test_bounds_reach_the_device_without_waiting_for_it() -> None:
    """Raises where a copy synchronises; it is made once for all layers."""
    from engine.attention.kernels.call import packed

    torch.cuda.set_sync_debug_mode("error")
    try:
        first = packed((0, 3, 11, 4099), GPU)
        assert packed((0, 3, 11, 4099), GPU) is first
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (first.cu_seqlens.tolist(), first.longest) == ([0, 3, 11, 4099], 4088)


def test_plain_attention_agrees_with_the_reference() -> None:
    """The reference itself, on this device, against PyTorch's own attention in float64."""
    one = call([300], [300], causal=True)
    q, k, v, _ = (x.double() for x in inputs(one, torch.bfloat16, 4, 4))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True
    )
    torch.testing.assert_close(reference.forward(q, k, v, one)[0], expected[0].transpose(0, 1))
