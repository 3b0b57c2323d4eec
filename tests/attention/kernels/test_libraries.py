"""Calls of GPU libraries, on stand-ins with their signatures: packing, bounds, order of arguments, layout of results.

If these fail, a GPU kernel gets something else than it asks for. What only a GPU shows is in test_on_gpu.py.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.attention.kernels import cudnn, flash_attn, plans, self_test, torch_varlen
from engine.attention.kernels.call import Call, Functions
from engine.cluster.communicators import TRANSFER_SMS
from tests.attention.kernels import libraries
from tests.attention.rings import CPU

BF16 = torch.bfloat16
LIBRARIES = {
    "flash_attn_2": flash_attn.load_2,
    "flash_attn_3": flash_attn.load_3,
    "flash_attn_4": flash_attn.load_4,
    "torch_varlen": torch_varlen.load,
    "cudnn": partial(cudnn.load, 0.0),
}
HEADS = plans.Heads(32, 8, 128, BF16)
each_library = pytest.mark.parametrize("load", LIBRARIES.values(), ids=LIBRARIES)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Forget what was computed with patched functions, before and after."""
    plans.cudnn_runs.cache_clear()
    yield
    plans.cudnn_runs.cache_clear()


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


def test_the_stand_in_has_the_signatures_of_an_installed_flash_attn_4() -> None:
    """Read from its source: importing it needs its compiler. `PYTHONPATH` may name a folder with an unpacked wheel."""
    package = find_spec("flash_attn")
    sources = [
        Path(folder, "cute", "interface.py") for folder in (package and package.submodule_search_locations) or ()
    ]
    source = next(filter(Path.exists, sources), None)
    if source is None:
        pytest.skip("flash-attn 4 is not installed")
    found = {one.name: one.args for one in ast.parse(source.read_text()).body if isinstance(one, ast.FunctionDef)}
    for name in ("_flash_attn_fwd", "_flash_attn_bwd"):
        ours = inspect.signature(getattr(libraries.flash_attn_4(), name)).parameters.values()
        theirs = [one.arg for one in found[name].args]
        assert [one.name for one in ours] == theirs
        defaults = [one.default for one in ours if one.default is not inspect.Parameter.empty]
        assert defaults == [ast.literal_eval(one) for one in found[name].defaults]


@each_library
def test_strided_tensors_are_made_what_the_library_takes(
    load: Callable[[], Functions], stand_ins: libraries.Cudnn
) -> None:
    kernel, one = load(), Call((0, 64, 128), (0, 64, 128), causal=True)
    q, k, v, dout = (torch.randn(16, heads, 128).to(BF16).transpose(0, 2) for heads in (4, 2, 2, 4))
    assert q.stride(-1) != 1
    out, lse = kernel.forward(q, k, v, one)
    found = (out, lse, *kernel.backward(dout, q, k, v, out, lse, one))
    q, k, v, dout = (x.contiguous() for x in (q, k, v, dout))
    for a, b in zip(found, (out, lse, *kernel.backward(dout, q, k, v, out, lse, one)), strict=True):
        assert torch.equal(a, b)


def test_the_log_sum_exp_of_cudnn_is_that_of_the_varlen_kernel(stand_ins: libraries.Cudnn) -> None:
    """A ring may use a different one of the two in each round."""
    q, k = torch.randn(128, 4, 16).to(BF16), torch.randn(128, 2, 16).to(BF16)
    for one in (Call((0, 128), (0, 128), True), Call((0, 64, 128), (0, 64, 128), True)):
        torch.testing.assert_close(
            *(load().forward(q, k, k, one)[1] for load in (LIBRARIES["cudnn"], torch_varlen.load))
        )
    assert stand_ins.calls == 2


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
    ("call", "expected"),
    [
        (Call((0, 5000), (0, 5000), True), True),
        (Call((0, 64, 128), (0, 64, 128), True), True),
        (Call((0, 1), (0, 1), True), False),
        (Call((0, 63, 126), (0, 63, 126), True), False),
        (Call((0, 2000, 4000), (0, 4100, 8200), False), True),
        (Call((0, 8192), (0, 4160), False), False),
        (Call((0, 4096), (0, 64), False), False),
        (Call((0, 1), (0, 8192), False), False),
        (Call((0, 63, 126), (0, 8192, 16384), False), False),
        (Call((0, 64), (0, 8192), False), True),
    ],
)
def test_cudnn_gets_sequences_that_it_computes_correctly(call: Call, expected: bool) -> None:
    (run,) = plans.runs(call)
    assert plans.cudnn_computes(run, call.causal) == expected


def test_runs_are_consecutive_sequences_of_one_length() -> None:
    assert plans.runs(Call((0,), (0,), True)) == []
    assert plans.runs(Call((0, 9, 18, 25, 34), (0, 9, 18, 25, 34), True)) == [(2, 9, 9), (1, 7, 7), (1, 9, 9)]
    assert plans.runs(Call((0, 100, 200), (0, 4100, 8000), False)) == [(1, 100, 4100), (1, 100, 3900)]


@pytest.mark.parametrize(
    ("call", "of_cudnn"),
    [
        # A ring's call of several rounds: all queries with the first half of some keys, half of them with all others.
        (Call((0, 128, 192), (0, 70, 280), False), 2),
        (Call((0, 5, 12, 76, 140, 143, 213), (0, 5, 12, 76, 140, 143, 213), True), 2),
        (Call((0, 128, 192, 320), (0, 64, 134, 198), False), 1),
        (Call((0, 5, 70), (0, 9, 73), False), 0),
    ],
)
def test_sequences_of_several_lengths_are_divided_between_both_kernels(
    call: Call, of_cudnn: int, stand_ins: libraries.Cudnn
) -> None:
    """Forward and backward against the varlen kernel for the whole call, and each row is written."""
    kernel = cudnn.load(0.0)
    q, k, v, dout = (torch.randn(bounds[-1], heads, 16).to(BF16) for bounds, heads in (
        (call.q_bounds, 4), (call.kv_bounds, 2), (call.kv_bounds, 2), (call.q_bounds, 4)
    ))  # fmt: skip
    found = []
    for one in (kernel, torch_varlen.load()):
        out, lse = one.forward(q, k, v, call)
        found.append((out, lse, *one.backward(dout, q, k, v, out, lse, call)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
    assert stand_ins.calls == 2 * of_cudnn


def test_a_run_pays_with_what_it_saves_beyond_its_own_call() -> None:
    """Else each length that comes often enough would get launches of its own in the end."""
    costs = plans.PlanCosts(build_s=1.0)
    alone, pair = Call((0, 500), (0, 500), True), Call((0, 500, 4500), (0, 500, 4500), True)
    (short,), (long,) = (plans.cudnn_runs(call, False, HEADS, costs) for call in (alone, pair))
    assert 0 < short.saved_s < costs.split_s, "too little beside another sequence"
    assert (long.start, long.stop, long.shape.run) == (1, 2, (1, 4000, 4000))
    assert long.saved_s == pytest.approx(64 * short.saved_s - costs.split_s)
    both = plans.cudnn_runs(pair, False, HEADS, costs._replace(split_s=0.0))
    assert [one.shape.run.queries for one in both] == [500, 4000]


def low(call: Call) -> tuple[Tensor, ...]:
    """Return q, k, v and the output's gradient, with scores of about -120."""
    q, k, v, dout = (
        torch.randn(bounds[-1], heads, 16).to(BF16)
        for bounds, heads in ((call.q_bounds, 4), (call.kv_bounds, 2), (call.kv_bounds, 2), (call.q_bounds, 4))
    )
    q[..., 0], k[..., 0] = 120, -4
    return q, k, v, dout


NAN_CALLS = pytest.mark.parametrize("call", [Call((0, 72), (0, 64), False), Call((0, 1, 2), (0, 128, 256), False)])


@NAN_CALLS
def test_calls_for_which_cudnns_gradients_are_nan_go_to_the_other_kernel(
    call: Call, stand_ins: libraries.Cudnn
) -> None:
    """Trained weights reach a log-sum-exp of -120, where one NaN ends a run."""
    kernel, (q, k, v, dout) = cudnn.load(0.0), low(call)
    out, lse = kernel.forward(q, k, v, call)
    assert lse.max() < -88.7
    assert all(x.isfinite().all() for x in kernel.backward(dout, q, k, v, out, lse, call))
    assert stand_ins.calls == 0


@NAN_CALLS
def test_a_kernel_whose_gradients_are_nan_is_seen_by_the_self_test(
    call: Call, stand_ins: libraries.Cudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each class alone: cuDNN gets the calls of one kind that it must not get."""
    queries = call.q_bounds[1]

    def careless(run: plans.Run, causal: bool) -> bool:
        return not causal and (run.queries == 1) == (queries == 1)

    monkeypatch.setattr(plans, "cudnn_computes", careless)
    assert re.match(
        f"its {'dk' if queries == 1 else 'dq'} is not finite for .* with a log-sum-exp of -120",
        str(self_test.fault(cudnn.load(0.0), CPU, BF16, 16)),
    )


def test_a_log_sum_exp_of_single_queries_in_another_order_is_seen_by_the_self_test(
    stand_ins: libraries.Cudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flash-attn 2 swaps queries and heads for them; its forks differ in what their kernels then write."""
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", libraries.flash_attn_2(kernel_writes_rows=True))
    assert str(self_test.fault(flash_attn.load_2(), CPU, BF16, 16)).startswith("its log-sum-exp is off")


@pytest.mark.parametrize("overlapped", [False, True])
def test_flash_attn_3_leaves_sms_to_transfers_only_while_there_are_any(
    overlapped: bool, stand_ins: libraries.Cudnn
) -> None:
    """Its kernel would keep every SM, and NCCL's transfers would wait for its end."""
    kernel, one = flash_attn.load_3(), Call((0, 6), (0, 6), True, overlapped)
    q = torch.randn(6, 2, 16).to(BF16)
    out, lse = kernel.forward(q, q, q, one)
    kernel.backward(out, q, q, q, out, lse, one)
    assert torch.ops.flash_attn_3.margins == [TRANSFER_SMS if overlapped else 0] * 2


def test_cudnn_is_used_once_a_shape_has_paid_for_its_plan(stand_ins: libraries.Cudnn) -> None:
    """Forward and backward have plans of their own: here the backward pass, with 2.5 times the work, pays first."""
    one = Call((0, 64), (0, 64), True)
    q, k = torch.randn(64, 4, 16).to(BF16), torch.randn(64, 2, 16).to(BF16)
    (found,) = plans.cudnn_runs(one, False, plans.Heads(4, 2, 16, BF16), plans.PlanCosts(0.0))
    kernel = cudnn.load(2.4 * found.saved_s)
    results, counts = [], []
    for _ in range(4):
        out, lse = kernel.forward(q, k, k, one)
        counts.append(stand_ins.calls)
        results.append((out, lse, *kernel.backward(out, q, k, k, out, lse, one)))
        counts.append(stand_ins.calls)
    assert counts == [0, 1, 1, 2, 3, 4, 5, 6]
    for result in results[1:]:
        for a, b in zip(result, results[0], strict=True):
            torch.testing.assert_close(a, b)


def test_no_sequence_never_reaches_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", None)
    kernel, nothing = torch_varlen.load(), torch.zeros(0, 2, 16, dtype=BF16)
    out, lse = kernel.forward(nothing, nothing, nothing, Call((0,), (0,), True))
    assert (out.shape, lse.shape) == ((0, 2, 16), (0, 2))
    assert len(kernel.backward(out, out, out, out, out, lse, Call((0,), (0,), True))) == 3
