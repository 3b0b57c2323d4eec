"""One layer of experts against a loop over tokens, and its parts by themselves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from engine.close import error
from engine.config.load import load
from engine.config.schema import Balance, Model
from engine.models.experts.grouped import KERNEL, LOOP, Products, choose, fault, grouped, outer
from engine.models.experts.layer import Experts, count_each


def shape(**changes: object) -> Model:
    return load([]).model.model_copy(
        update={"family": "mixtral", "hidden": 16, "ffn": 24, "experts": 5, "top_k": 2} | changes
    )


def layer(dtype: torch.dtype = torch.float64, **changes: object) -> Experts:
    experts = Experts(shape(**changes)).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(0, 0.5, generator=generator)
    return experts


def inputs(tokens: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(tokens, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def one_by_one(experts: Experts, x: Tensor) -> Tensor:
    """Return the layer's output, each token by itself."""
    rows = []
    for token in x:
        probabilities = (experts.router.weight @ token).softmax(0)
        weights, chosen = probabilities.topk(experts.top_k)
        outs = [experts.down[e] @ (F.silu(experts.gate[e] @ token) * (experts.up[e] @ token)) for e in chosen.tolist()]
        rows.append(sum(w * out for w, out in zip(weights / weights.sum(), outs, strict=True)))
    return torch.stack(rows)


@pytest.mark.parametrize(("count", "top_k"), [(5, 1), (5, 2), (5, 5), (2, 1)])
def test_a_layer_is_that_of_each_token_by_itself(count: int, top_k: int) -> None:
    experts, x = layer(experts=count, top_k=top_k), inputs(33).requires_grad_()
    out, routed = experts(x)
    expected = one_by_one(experts, x)
    assert error(out, expected) < 1e-13 and routed.chosen.shape == (33, top_k)
    wanted = [x, *experts.parameters()] if top_k > 1 else [x, experts.gate, experts.up, experts.down]
    found = (torch.autograd.grad(value, wanted, torch.ones_like(out)) for value in (out, expected))
    assert max(error(a, b) for a, b in zip(*found, strict=True)) < 1e-12


@pytest.mark.parametrize("tokens", [0, 1])
def test_an_expert_that_no_token_chose_has_a_gradient_of_zeros(tokens: int) -> None:
    """A parameter without one makes ranks differ in what they reduce: a hang, or norms that differ."""
    experts, x = layer(), inputs(tokens).requires_grad_()
    out, routed = experts(x)
    out.sum().backward()
    assert out.shape == (tokens, 16) and x.grad is not None
    idle = [e for e in range(5) if e not in routed.chosen]
    assert len(idle) == 5 - 2 * tokens
    for parameter in (experts.gate, experts.up, experts.down):
        assert parameter.grad is not None and (parameter.grad[idle] == 0).all()
    assert experts.router.weight.grad is not None


def test_no_token_is_dropped_when_all_choose_the_same_expert() -> None:
    experts, x = layer(), inputs(50).abs()
    with torch.no_grad():
        experts.router.weight.zero_()
        experts.router.weight[3] = 10
    out, routed = experts(x)
    assert (routed.chosen == 3).any(1).all()
    assert error(out, one_by_one(experts, x)) < 1e-13


def test_a_bias_moves_the_choice_and_no_weight() -> None:
    """An expert that is chosen for its bias still counts by its probability, and the router learns from it."""
    balance = Balance(by="bias", loss_weight=0, bias_rate=0.5, z_weight=0)
    plain, x = layer(), inputs(30)
    experts = Experts(shape(), balance).double()
    experts.load_state_dict(plain.state_dict() | {"bias": torch.tensor([0, 10, 0, 0, 8])})
    out, routed = experts(x)
    assert (routed.chosen == torch.tensor([1, 4])).all()
    alone = layer(experts=2)
    for name, parameter in alone.named_parameters():
        parameter.data = plain.get_parameter(name).data[[1, 4]]
    expected = alone(x)[0]  # a softmax over the chosen two is their probabilities, made to sum to one
    assert error(out, expected) < 1e-13
    (found,) = torch.autograd.grad(out.sum(), [experts.router.weight])
    (wanted,) = torch.autograd.grad(expected.sum(), [alone.router.weight])
    assert error(found[[1, 4]], wanted) < 1e-12


def test_the_router_of_bf16_speaks_float32() -> None:
    """Its logits are those of exact arithmetic on the rounded weights; in bf16 near scores would be equal."""
    experts, x = layer(torch.bfloat16), inputs(40, torch.bfloat16)
    out, routed = experts(x)
    exact = x.double() @ experts.router.weight.double().T
    assert (out.dtype, routed.logits.dtype) == (torch.bfloat16, torch.float32)
    assert error(routed.logits.double(), exact) < 1e-6
    assert torch.equal(routed.chosen, exact.topk(2).indices)


def test_a_token_costs_its_experts_and_no_more() -> None:
    experts, x = layer(), inputs(40)
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        experts(x)
    assert counted.get_total_flops() == 2 * 40 * (2 * 3 * 16 * 24 + 5 * 16)


COUNTS = {"some without rows": [0, 3, 0, 9, 0], "all": [1, 2, 3, 4, 5], "one": [0, 0, 6, 0, 0]}


def by_autograd(rows: Tensor, weight: Tensor, dout: Tensor, counts: Tensor) -> list[Tensor]:
    """The product with the transposed matrices of `weight` [E,O,I], and the gradients of rows and weight."""
    rows, weight = (x.detach().requires_grad_() for x in (rows, weight))
    parts = zip(rows.split(counts.tolist()), weight, strict=True)
    out = torch.cat([F.linear(part, matrix) for part, matrix in parts])
    return [out, *torch.autograd.grad(out, (rows, weight), dout)]


@pytest.mark.parametrize("products", [KERNEL, LOOP], ids=["kernel", "loop"])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_products_and_their_gradients_are_those_of_autograd(counts: list[int], products: Products) -> None:
    """The kernel on the CPU has the signature of the GPU's; a gradient that it left as it was would be NaN."""
    generator, each = torch.Generator().manual_seed(0), torch.tensor(counts)
    rows = torch.randn(sum(counts), 16, generator=generator)
    weight = torch.randn(5, 24, 16, generator=generator)
    dout = torch.randn(24, sum(counts), generator=generator).T  # not contiguous
    found = (
        products.grouped(rows, weight.transpose(1, 2), each),
        products.grouped(dout, weight, each),
        products.outer(dout, rows, each),
    )
    for a, b in zip(found, by_autograd(rows, weight, dout, each), strict=True):
        assert error(a, b) < 1e-6
    assert (found[2][each == 0] == 0).all()


def test_the_self_test_finds_a_broken_grouped_kernel() -> None:
    assert fault(KERNEL, torch.device("cpu")) is None
    for name, wrong in (("product", "grouped"), ("dweight", "outer")):
        right = getattr(KERNEL, wrong)
        broken = KERNEL._replace(**{wrong: lambda *inputs, right=right: right(*inputs) * 1.1})
        assert f"its {name} is off by" in str(fault(broken, torch.device("cpu")))


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [[3, 0, 130, 1, 66], [0, 0, 7, 0, 0], [64] * 5])
def test_the_gpus_own_kernel_is_that_of_the_loop(counts: list[int]) -> None:
    """bf16 on the device against float64 on the CPU; experts without rows have gradients of zero."""
    generator, sizes = torch.Generator().manual_seed(0), ((sum(counts), 64), (5, 96, 64), (sum(counts), 96))
    exact = [torch.randn(*size, generator=generator).bfloat16().double() for size in sizes]
    rows, weight, dout = (x.to("cuda", torch.bfloat16) for x in exact)
    each = torch.tensor(counts, device="cuda")
    assert choose(rows.device).name == "grouped_mm"
    found = (grouped(rows, weight.transpose(1, 2), each), grouped(dout, weight, each), outer(dout, rows, each))
    for a, b in zip(found, by_autograd(*exact, each.cpu()), strict=True):
        assert error(a.cpu(), b) < 2e-2
    assert (found[2][each == 0] == 0).all()


def test_slots_are_counted() -> None:
    slots = torch.tensor([4, 0, 4, 1])
    assert count_each(slots, 6).tolist() == [1, 1, 0, 0, 2, 0]
    assert count_each(slots[:0], 2).tolist() == [0, 0]
