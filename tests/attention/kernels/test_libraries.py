"""Calls of GPU libraries, on stand-ins with their signatures: packing, bounds, order of arguments, layout of results.

If these fail, a GPU kernel gets something else than it asks for. What only a GPU shows is in test_on_gpu.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from engine.attention.kernels import cudnn, flash_attn, self_test, torch_varlen
from engine.attention.kernels.call import Call, Functions
from tests.attention.kernels import libraries
from tests.attention.rings import CPU

BF16 = torch.bfloat16
LIBRARIES = {
    "flash_attn_2": flash_attn.load_2,
    "flash_attn_3": flash_attn.load_3,
    "flash_attn_4": flash_attn.load_4,
    "torch_varlen": torch_varlen.load,
    "cudnn": cudnn.load_for_any_length,
}
each_library = pytest.mark.parametrize("load", LIBRARIES.values(), ids=LIBRARIES)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> libraries.Cudnn:
    """Install all libraries on CPU; return the one that counts its calls."""
    dense = libraries.Cudnn()
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", libraries.flash_attn_2())
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", libraries.flash_attn_4())
    monkeypatch.setitem(sys.modules, "flash_attn_interface", libraries.flash_attn_2())
    monkeypatch.setattr(torch.ops, "flash_attn_3", libraries.flash_attn_3(), raising=False)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", dense.forward)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention_backward", dense.backward)
    libraries.torch_varlen(monkeypatch)
    return dense


@each_library
def test_numbers_are_those_of_the_reference(load: Callable[[], Functions], stand_ins: libraries.Cudnn) -> None:
    """Packed causal sequences, and blocks of a ring with the merged output and log-sum-exp; shared key heads."""
    assert self_test.fault(load(), CPU, BF16, 16) is None


@each_library
def test_strided_tensors_are_made_what_the_library_takes(
    load: Callable[[], Functions], stand_ins: libraries.Cudnn
) -> None:
    kernel, one = load(), Call((0, 6, 12), (0, 6, 12), causal=True)
    q, k, v, dout = (torch.randn(16, heads, 12).to(BF16).transpose(0, 2) for heads in (4, 2, 2, 4))
    assert q.stride(-1) != 1
    out, lse = kernel.forward(q, k, v, one)
    found = (out, lse, *kernel.backward(dout, q, k, v, out, lse, one))
    q, k, v, dout = (x.contiguous() for x in (q, k, v, dout))
    for a, b in zip(found, (out, lse, *kernel.backward(dout, q, k, v, out, lse, one)), strict=True):
        assert torch.equal(a, b)


@each_library
def test_a_gradient_that_is_one_number_for_all_rows_is_taken(
    load: Callable[[], Functions], stand_ins: libraries.Cudnn
) -> None:
    """`out.sum().backward()` gives strides of 0."""
    kernel, one = load(), Call((0, 6), (0, 6), causal=True)
    q = torch.randn(6, 2, 16).to(BF16)
    out, lse = kernel.forward(q, q, q, one)
    ones = torch.ones((), dtype=BF16).expand(q.shape)
    for a, b in zip(
        kernel.backward(ones, q, q, q, out, lse, one),
        kernel.backward(ones.contiguous(), q, q, q, out, lse, one),
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["torch_varlen", "cudnn"])
@pytest.mark.parametrize("call", [Call((0, 5, 10), (0, 7, 14), False), Call((0, 5, 70), (0, 5, 70), True)])
def test_pytorchs_own_operators_take_the_call(name: str, call: Call) -> None:
    """On meta tensors: PyTorch checks names, order and types of arguments, and gives shapes."""
    kernel, meta = LIBRARIES[name](), torch.device("meta")
    q, k = (torch.empty(bounds[-1], heads, 64, dtype=BF16, device=meta) for bounds, heads in zip(call, (4, 2)))  # type: ignore[misc] # noqa: B905
    out, lse = kernel.forward(q, k, k, call)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, BF16, q.shape[:2], torch.float32)
    assert [x.shape for x in kernel.backward(out, q, k, k, out, lse, call)] == [q.shape, k.shape, k.shape]


@pytest.mark.parametrize(
    ("call", "calls"),
    [
        (Call((0, 5000), (0, 5000), True), 1),
        (Call((0, 4100, 8200), (0, 4100, 8200), True), 1),
        (Call((0, 2000), (0, 4100), False), 1),
        (Call((0, 4100, 8000), (0, 4100, 8000), True), 0),
        (Call((0, 64, 128), (0, 64, 128), True), 0),
    ],
)
def test_cudnn_gets_long_sequences_of_one_length(call: Call, calls: int) -> None:
    """Each new shape costs it a plan; the others' kernel takes any lengths."""
    assert cudnn._Cudnn(cudnn.LEAST_TOKENS, torch_varlen.load())._serves(call) == bool(calls)


def test_no_sequence_never_reaches_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", None)
    kernel, nothing = torch_varlen.load(), torch.zeros(0, 2, 16, dtype=BF16)
    out, lse = kernel.forward(nothing, nothing, nothing, Call((0,), (0,), True))
    assert (out.shape, lse.shape) == ((0, 2, 16), (0, 2))
    assert len(kernel.backward(out, out, out, out, out, lse, Call((0,), (0,), True))) == 3
