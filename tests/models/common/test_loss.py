"""The summed loss of the head: parts of a batch must add up to the same, whatever the parts."""

from __future__ import annotations

import math
import sys
from functools import partial
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.loss import differences, measure
from engine.close import error
from engine.cost.activations import loss_chunk
from engine.data.inputs import IGNORE
from engine.models.common import loss
from engine.models.common.loss import Head, choose, head_loss, token_loss
from engine.selection import Candidate

CPU = torch.device("cpu")
FORMS = ["plain", "chunks", *(["torch"] if hasattr(F, "linear_cross_entropy") else [])]
SCALE = 0.37
TOKENS, VOCAB, HIDDEN = 2600, 40, 8  # three chunks of unequal size


def example(tokens: int = TOKENS, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, the head's weight and labels, one in seven of them ignored."""
    random = torch.Generator().manual_seed(tokens)
    x, weight = (torch.randn(rows, HIDDEN, generator=random, dtype=torch.float64) for rows in (tokens, VOCAB))
    labels = torch.randint(0, VOCAB, (tokens,), generator=random)
    labels[::7] = IGNORE
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def run(form: str, x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, and its gradients by x and the weight under a scale that is applied afterwards."""
    loss = choose(CPU, x.dtype, form).implementation(x, weight, labels, IGNORE)
    return loss.detach(), *torch.autograd.grad(loss * SCALE, (x, weight))


def test_the_example_has_several_chunks() -> None:
    assert 2 * loss_chunk(TOKENS, HIDDEN, VOCAB) < TOKENS < 3 * loss_chunk(TOKENS, HIDDEN, VOCAB)


def test_the_plain_form_is_the_sum_of_minus_log_of_softmax() -> None:
    x, weight, labels = example(8)
    rows = (x @ weight.T).tolist()
    expected = sum(
        math.log(sum(map(math.exp, row))) - row[label]
        for row, label in zip(rows, labels.tolist(), strict=True)
        if label != IGNORE
    )
    assert run("plain", x, weight, labels)[0].item() == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("form", FORMS[1:])
def test_chunks_are_the_plain_form_also_under_a_scale(form: str, dtype: torch.dtype, bound: float) -> None:
    """The trainer multiplies the summed loss by W / T afterwards: the head's gradient must not miss it."""
    found, plain = run(form, *example(dtype=dtype)), run("plain", *example(dtype=dtype))
    assert [error(a, b) < bound for a, b in zip(found, plain, strict=True)] == [True] * 3
    assert [a.dtype for a in found] == [dtype] * 3


@pytest.mark.parametrize("form", FORMS)
def test_parts_add_up(form: str) -> None:
    x, weight, labels = example()
    parts = [run(form, x[part], weight, labels[part]) for part in (slice(0, 4), slice(4, 4), slice(4, TOKENS))]
    loss, dx, dweight = run(form, x, weight, labels)
    assert error(sum(part[0] for part in parts), loss) < 1e-13
    assert error(torch.cat([part[1] for part in parts]), dx) < 1e-13
    assert error(sum(part[2] for part in parts), dweight) < 1e-13


@pytest.mark.parametrize("form", FORMS)
def test_ignored_labels_count_for_nothing(form: str) -> None:
    x, weight, labels = example()
    kept = labels != IGNORE
    loss, dx, dweight = run(form, x, weight, labels)
    kept_loss, kept_dx, kept_dweight = run(form, x[kept], weight, labels[kept])
    assert error(loss, kept_loss) < 1e-13 and error(dweight, kept_dweight) < 1e-13
    assert error(dx[kept], kept_dx) < 1e-13 and (dx[~kept] == 0).all()


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("form", FORMS)
def test_without_a_loss_token_it_is_a_zero_still_connected(form: str, tokens: int) -> None:
    """A rank without work must run the backward pass all the same, and change nothing."""
    x, weight, _ = example(tokens)
    loss, dx, dweight = run(form, x, weight, torch.full((tokens,), IGNORE))
    assert loss.item() == 0 and (dx == 0).all() and (dweight == 0).all()
    assert (dx.shape, dweight.shape) == (x.shape, weight.shape)


@pytest.mark.parametrize("form", ["plain", "chunks"])
def test_bf16_is_summed_in_float32(form: str) -> None:
    """In bf16 a sum of thousands of tokens would stop growing."""
    x, weight, labels = example(dtype=torch.bfloat16)
    found = run(form, x, weight, labels)
    exact = run("plain", *(part.detach().double().requires_grad_() for part in (x, weight)), labels)
    assert [a.dtype for a in found] == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert error(found[0], exact[0]) < (1e-6 if form == "chunks" else 1e-3)  # the plain one's logits are bf16
    assert error(found[1], exact[1]) < 2e-2 and error(found[2], exact[2]) < 2e-2


def test_the_weights_gradient_is_rounded_to_bf16_once_whatever_the_number_of_chunks() -> None:
    x, weight, labels = example(dtype=torch.bfloat16)
    _, _, found = run("chunks", x, weight, labels)
    exact = run("plain", *(part.detach().double().requires_grad_() for part in (x, weight)), labels)[2]
    assert (found == exact.bfloat16()).double().mean() > 0.99


def test_validation_forms_no_gradient() -> None:
    x, weight, labels = example()
    with torch.no_grad():
        loss = choose(CPU, x.dtype, "chunks").implementation(x, weight, labels, IGNORE)
    assert not loss.requires_grad and loss.grad_fn is None
    assert error(loss, run("plain", x, weight, labels)[0]) < 1e-12


@pytest.mark.parametrize("form", FORMS[1:])
def test_a_tied_heads_gradient_adds_to_the_embeddings(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "choose", lambda device, dtype: choose(device, dtype, form))
    _, table, labels = example()
    tokens = labels.where(labels != IGNORE, 0)
    expected = torch.autograd.grad(token_loss(table[tokens] @ table.T, labels), table)
    found = torch.autograd.grad(head_loss(table[tokens], table, labels), table)
    assert error(found[0], expected[0]) < 1e-12


@pytest.mark.parametrize("form", FORMS[1:])
def test_memory_is_below_fifteen_hundredths_of_the_plain_forms(form: str) -> None:
    """A sixty-fourth of 8,192 tokens x 128,256 at hidden 256, which benchmarks/loss.py measures."""
    plain, found = (measure(name, tokens=8192, vocab=2004, hidden=4) for name in ("plain", form))
    assert found.peak_bytes < 0.15 * plain.peak_bytes
    assert max(differences(found, plain).values()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_choice_is_logged_once_with_its_reason(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    choose.cache_clear()
    with caplog.at_level("INFO"):
        chosen = choose(CPU, dtype)
        assert choose(CPU, dtype) is chosen and chosen.name == "chunks"
    expected = f"loss implementation for {dtype}: chunks ({chosen.reason})"
    assert [record.message for record in caplog.records] == [expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pytorchs_serves_wide_dtypes_on_gpus(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    choose.cache_clear()
    monkeypatch.setattr(loss, "fault", lambda *_, **more: None)  # there is no such device
    assert choose(torch.device("cuda"), dtype).name == FORMS[-1]


@pytest.mark.parametrize("factor", [1.01, float("nan"), None])
def test_a_broken_one_is_reported_and_not_used(
    factor: float | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(x: Tensor, weight: Tensor, labels: Tensor, ignore: int) -> Tensor:
        if factor is None:
            raise RuntimeError("no kernel image\nand a long story")
        return loss._plain_loss(x, weight, labels, ignore) * factor

    test = partial(loss.fault, device=CPU, dtype=torch.float32)
    offers = [Candidate("new", "it is new", lambda: broken, test), *loss.candidates(CPU, torch.float32)]
    monkeypatch.setattr(loss, "candidates", lambda *_: offers)
    choose.cache_clear()
    assert choose(CPU, torch.float32).name == "chunks"
    choose.cache_clear()
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    said = {None: "RuntimeError: no kernel image", 1.01: "its loss is off by"}.get(factor, "its loss is not finite")
    assert "new is installed but broken" in warning and said in warning and "story" not in warning


@pytest.mark.parametrize(
    ("dtype", "name", "why"),
    [
        (torch.bfloat16, "torch", "torch: accumulates in torch.bfloat16"),
        (torch.float32, "liger", "liger: for bf16 and fp16 on CUDA devices only"),
        (torch.float32, "x", "'x' is not known"),
    ],
)
def test_a_requested_loss_that_does_not_work_is_refused(dtype: torch.dtype, name: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"no loss implementation for {dtype}: {why}"):
        choose(CPU, dtype, name)


def test_liger_serves_bf16_on_gpus_if_it_can_add_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}
    monkeypatch.setattr(loss, "fault", lambda *_, **more: None)  # there is no such device

    def fused(x: Tensor, weight: Tensor, labels: Tensor, accum_dtype: torch.dtype, **more: object) -> Tensor:
        asked.update(more, accum_dtype=accum_dtype)
        return x.sum()

    def old(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        raise AssertionError

    for function, name in ((fused, "liger"), (old, "chunks")):
        choose.cache_clear()
        liger = ModuleType("liger_kernel.transformers.functional")
        liger.liger_fused_linear_cross_entropy = function  # type: ignore[attr-defined]
        for parent in ("liger_kernel", "liger_kernel.transformers"):
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        monkeypatch.setitem(sys.modules, liger.__name__, liger)
        assert choose(torch.device("cuda"), torch.bfloat16).name == name
        choose(torch.device("cuda"), torch.bfloat16).implementation(
            *example(3, torch.bfloat16), -7
        ) if name == "liger" else None
    choose.cache_clear()
    assert asked == {"ignore_index": -7, "reduction": "sum", "accum_dtype": torch.float32}


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["chunks", "liger"])
def test_bf16_on_a_gpu(form: str) -> None:
    """PyTorch's product of bf16 that gives float32 runs on GPUs alone; Liger's logits are rounded to bf16."""
    if form == "liger":
        pytest.importorskip("liger_kernel")
    x, weight, labels = (part.detach().cuda() for part in example(dtype=torch.bfloat16))
    loss = choose(x.device, x.dtype, form).implementation(x.requires_grad_(), weight.requires_grad_(), labels, IGNORE)
    found = (loss.detach(), *torch.autograd.grad(loss * SCALE, (x, weight)))
    exact = run("plain", *(part.detach().double().cpu().requires_grad_() for part in (x, weight)), labels.cpu())
    assert found[0].dtype == torch.float32 and error(found[0].cpu(), exact[0]) < (1e-5 if form == "chunks" else 1e-3)
    assert error(found[1].cpu(), exact[1]) < 2e-2 and error(found[2].cpu(), exact[2]) < 2e-2


def test_the_head_gives_logits_or_their_loss() -> None:
    x, weight, labels = example()
    head = Head(HIDDEN, VOCAB).double()
    head.weight = torch.nn.Parameter(weight.detach())
    assert torch.equal(head(x), x @ weight.T)
    assert error(head(x, labels).detach(), token_loss(x @ weight.T, labels).detach()) < 1e-12
