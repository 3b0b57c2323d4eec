"""Which kernel is chosen, and that a broken one is reported by name and not used.

If these fail, training runs on a slow kernel in silence, or on a wrong one.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from engine.attention.kernels import choice, reference, self_test
from engine.attention.kernels.call import Call, Functions
from engine.attention.kernels.choice import choose
from tests.attention.rings import CPU

CUDA, BF16 = torch.device("cuda"), torch.bfloat16


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Forget what was chosen, before and after."""
    choose.cache_clear()
    yield
    choose.cache_clear()


def candidates(patch: pytest.MonkeyPatch, **loads: Callable[[], Functions]) -> None:
    """Offer these kernels and the reference, on any device; a name is also the package's."""
    found = {name: choice.Entry(name, load, package=name, device="any") for name, load in loads.items()}
    patch.setattr(choice, "KERNELS", found | {"reference": choice.KERNELS["reference"]})


def raises(error: Exception) -> Callable[..., Any]:
    def load(*_: Any) -> Any:
        raise error

    return load


def wrong(what: int) -> Callable[[], Functions]:
    """Return a kernel whose result number `what` (out, lse, dq, dk, dv) is a tenth too large."""

    def scaled(results: tuple[Any, ...], first: int) -> Any:
        return tuple(1.1 * x if first + number == what else x for number, x in enumerate(results))

    return lambda: Functions(
        lambda *inputs: scaled(reference.forward(*inputs), 0), lambda *inputs: scaled(reference.backward(*inputs), 2)
    )


def test_the_fused_kernel_is_chosen_on_cpu_and_the_reason_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        found = [choose(CPU, BF16, 64) for _ in range(3)]
    assert {one.name for one in found} == {"fused_cpu"}
    assert [record.message for record in caplog.records] == [
        "attention kernel for torch.bfloat16, head size 64: fused_cpu (PyTorch's fused kernel for CPU)"
    ]


@pytest.mark.parametrize("name", ["fused_cpu", "reference"])
def test_a_kernel_is_chosen_by_name(name: str) -> None:
    assert choose(CPU, torch.float32, 8, name).name == name


@pytest.mark.parametrize(
    ("device", "prefer", "why"),
    [
        ("cpu", "fusd_cpu", "'fusd_cpu' is not known"),
        ("cuda", "fused_cpu", "fused_cpu: runs on CPUs only"),
        ("cpu", "", "'' is not known"),
        ("cpu", "torch_varlen", "torch_varlen: runs on CUDA devices only"),
    ],
)
def test_refuses_a_kernel_that_is_not_there(device: str, prefer: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"no attention kernel for torch.float32, head size 8: {why}"):
        choose(torch.device(device), torch.float32, 8, prefer)


def test_without_a_device_the_reference_serves_and_says_why_not_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = choose(CUDA, BF16, 64)
    assert (found.name, found.reason) == ("reference", "no fused kernel works here")
    assert found.rejected[:2] == ("fused_cpu: runs on CPUs only", "flash_attn_3: no CUDA device was found")
    assert [line.partition(":")[0] for line in found.rejected] == list(choice.KERNELS)[:-1]


@pytest.mark.parametrize(
    ("capability", "offered"),
    [
        ((7, 5), []),
        ((8, 0), ["flash_attn_2", "torch_varlen"]),
        ((8, 9), ["flash_attn_2", "torch_varlen"]),
        ((9, 0), ["flash_attn_3", "flash_attn_4", "cudnn", "flash_attn_2", "torch_varlen"]),
        ((10, 0), ["flash_attn_4", "cudnn", "flash_attn_2", "torch_varlen"]),
    ],
)
def test_what_a_gpu_is_offered_and_in_which_order(
    capability: tuple[int, int], offered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    fused = {name: kernel for name, kernel in choice.KERNELS.items() if name != "reference"}
    assert [name for name, kernel in fused.items() if choice.unsupported(kernel, CUDA, BF16, 128) is None] == offered
    for dtype, head_dim in ((torch.float32, 128), (BF16, 12), (BF16, 264)):
        assert all(choice.unsupported(kernel, CUDA, dtype, head_dim) for kernel in fused.values())


def test_the_first_that_works_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates(monkeypatch, good=reference.load, better_not_reached=raises(AssertionError()))
    found = choose(CPU, torch.float32, 16)
    assert (found.name, found.rejected) == ("good", ())


@pytest.mark.parametrize(
    "error",
    [
        ImportError("undefined symbol: _ZN3c10"),
        ModuleNotFoundError("No module named 'cutlass'", name="cutlass"),
        RuntimeError("CUDA error: no kernel image is available"),
        TypeError("unexpected keyword argument 'cu_seqlens_q'"),
        AssertionError("head_dim"),
        OSError("libcudnn.so.9: cannot open shared object file"),
    ],
)
def test_an_installed_kernel_that_is_broken_is_reported_by_name_and_the_next_is_used(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    candidates(monkeypatch, broken=raises(error), good=reference.load)
    found = choose(CPU, torch.float32, 16)
    assert found.name == "good"
    assert found.rejected == (f"broken: installed but broken: {type(error).__name__}: {error}",)
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "broken is installed but broken" in warnings[0] and str(error) in warnings[0]


def test_a_kernel_that_raises_when_it_is_called_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates(monkeypatch, broken=lambda: Functions(*[raises(RuntimeError("misaligned address"))] * 2))
    assert choose(CPU, torch.float32, 16).rejected[0].endswith("RuntimeError: misaligned address")


@pytest.mark.parametrize(("what", "name"), [*enumerate(self_test.NAMES)])
@pytest.mark.parametrize("dtype", [BF16, torch.float64])
def test_a_kernel_with_wrong_numbers_is_reported(
    what: int, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    candidates(monkeypatch, wrong=wrong(what))
    found = choose(CPU, dtype, 16)
    assert found.name == "reference" and f"its {name} is off by" in found.rejected[0]
    assert "wrong is installed but broken" in caplog.text


@pytest.mark.parametrize(("what", "name"), [*enumerate(self_test.NAMES)])
@pytest.mark.parametrize("causal", [True, False])
def test_a_kernel_that_leaves_out_later_tiles_of_packed_sequences_is_reported(
    what: int, name: str, causal: bool
) -> None:
    """As one whose scheduler is wrong for sequences of several lengths: rows after the first 128 are not computed."""

    def left_out(results: tuple[Any, ...], first: int, call: Call) -> Any:
        if 0 <= what - first < len(results) and call.causal == causal:
            for queries, keys in call.sequences():
                results[what - first][keys if name in ("dk", "dv") else queries][128:] = 0
        return results

    kernel = Functions(
        lambda *inputs: left_out(reference.forward(*inputs), 0, inputs[-1]),
        lambda *inputs: left_out(reference.backward(*inputs), 2, inputs[-1]),
    )
    assert str(self_test.fault(kernel, CPU, BF16, 16)).startswith(f"its {name} is off by")


def test_a_kernel_that_gives_nan_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates(
        monkeypatch,
        nan=lambda: Functions(lambda *x: tuple(y * float("nan") for y in reference.forward(*x)), reference.backward),
    )
    assert "its output is not finite" in choose(CPU, torch.float32, 16).rejected[0]


def test_one_that_is_not_installed_is_no_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    candidates(monkeypatch, nowhere=lambda: importlib.import_module("nowhere.at_all") and reference.load())
    assert choose(CPU, torch.float32, 16).rejected == ("nowhere: not installed",)
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]


def test_a_broken_kernel_that_was_asked_for_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates(monkeypatch, broken=raises(RuntimeError("no kernel image")))
    with pytest.raises(ValueError, match=r"broken: installed but broken: .*no kernel image"):
        choose(CPU, torch.float32, 16, "broken")


def test_choosing_leaves_the_random_numbers_alone() -> None:
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    choose(CPU, torch.float32, 8)
    assert torch.equal(torch.randn(4), expected)
