"""Models whose sequences run in slices, on rings of threads, against the same model on whole sequences.

If these fail, losses, gradients or the balance of experts depend on where sequences were cut.
Error of a tensor = max|a - b| / max|b|.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from engine.attention.buffers import Buffers
from engine.attention.context import AttentionContext
from engine.attention.kernels.choice import choose
from engine.attention.prefix import Prefixes
from engine.close import error
from engine.config.schema import Balance
from engine.data.inputs import IGNORE
from engine.models.common.initialise import initialise
from engine.models.decoder import Decoder
from engine.models.experts.balance import expert_counts, load_balancing_loss
from engine.models.experts.layer import Routed
from engine.models.recompute import MODES
from tests.attention.rings import CPU, Placed, ThreadComm, strict
from tests.attention.sliced import Interleaved, cut, mixed
from tests.covering import in_turn
from tests.models.shapes import LLAMA, mixtral_shape

TOLERANCE = 1e-10
BALANCE = Balance(by="loss", loss_weight=0.3, bias_rate=0.05, z_weight=0.02)
KERNEL = choose(CPU, torch.float64, 8)


class Found(NamedTuple):
    """Of all ranks together, or of whole sequences."""

    loss: float
    gradients: dict[str, Tensor]
    counts: Tensor | int = 0  # tokens per expert


def prepared(model: Decoder, mode: str = "none") -> Decoder:
    """Return the model in float64 with large weights, so that errors show."""
    initialise(model.double(), 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.dim() > 1 else 1)
    model.run_layer = MODES[mode]
    return model


def numbers(one: Interleaved, vocab: int) -> tuple[Tensor, Tensor]:
    """Return tokens and labels of all sequences, [N] each; some labels are ignored."""
    generator = torch.Generator().manual_seed(one.seed)
    tokens, labels = torch.randint(0, vocab, (2, one.tokens), generator=generator)
    labels[torch.rand(one.tokens, generator=generator) < 0.2] = IGNORE
    return tokens, labels


def found(models: list[Decoder], loss: float) -> Found:
    gradients = {
        name: sum(parameter.grad for parameter in parameters)  # type: ignore[misc]
        for name, *parameters in (
            (of_all[0][0], *(parameter for _, parameter in of_all))
            for of_all in zip(*(model.named_parameters() for model in models), strict=True)
        )
    }
    counts = sum(model.tally.expert_counts for model in models if model.experts())
    return Found(loss, gradients, counts)


def whole(model: Decoder, one: Interleaved) -> Found:
    """Run all sequences on one device, in one piece."""
    model, (tokens, labels) = deepcopy(model), numbers(one, model.shape.vocab)
    loss = model(tokens, one.positions, labels)
    loss.backward()
    return found([model], loss.item())


def on_ranks(
    model: Decoder, one: Interleaved, backward: Callable[[Tensor], Any] = Tensor.backward, stores: Any = None
) -> Found:
    """Run the passes of `one` on each rank, which has a model of its own; gradients and losses are summed."""
    tokens, labels = numbers(one, model.shape.vocab)
    models, stores = [deepcopy(model) for _ in range(one.world)], stores or [Prefixes() for _ in range(one.world)]
    kernel = strict(choose(CPU, torch.float64, model.shape.head_dim))

    def run(rank: int, comm: ThreadComm) -> float:
        running, total = dict[int, Tensor](), 0.0
        for place, forward in one.order:
            if not forward:
                backward(running.pop(place))
                continue
            rows = one.rows(rank, place)
            attention = AttentionContext(one.layout(rank, place), comm, kernel, stores[rank])
            running[place] = models[rank](tokens[rows], one.positions[rows], labels[rows], attention)
            total += running[place].item()
        assert len(stores[rank]) == 0, "something is kept after the last backward pass"
        return total

    return found(models, sum(one.on_ranks(run)))


def check(result: Found, expected: Found) -> None:
    assert abs(result.loss / expected.loss - 1) < TOLERANCE
    worst = {name: error(value, expected.gradients[name]) for name, value in result.gradients.items()}
    assert max(worst.values()) < TOLERANCE, worst
    assert torch.equal(torch.as_tensor(result.counts), torch.as_tensor(expected.counts))


@in_turn("slices, degree, mode", [1, 2, 3, 7], [1, 2, 3, 4], list(MODES))
def test_a_llama_in_slices_is_the_same(slices: int, degree: int, mode: str) -> None:
    """Recompute runs the attention of a slice again, which must see the same earlier slices, and only these."""
    model, one = prepared(Decoder(LLAMA["gqa tied"]), mode), mixed(slices, degree, seed=slices)
    check(on_ranks(model, one), whole(model, one))


@in_turn("slices, degree, by", [1, 2, 3, 7], [1, 2, 3, 4], ["loss", "bias"])
def test_experts_are_balanced_as_without_slices(slices: int, degree: int, by: str) -> None:
    model = prepared(Decoder(mixtral_shape(), BALANCE.model_copy(update={"by": by})))
    one = mixed(slices, degree, seed=10 + slices)
    check(on_ranks(model, one), whole(model, one))


@pytest.mark.parametrize("mode", MODES)
def test_experts_in_slices_are_recomputed(mode: str) -> None:
    model, one = prepared(Decoder(mixtral_shape(), BALANCE), mode), mixed(3, 2, seed=5)
    check(on_ranks(model, one), whole(model, one))


@pytest.mark.parametrize("make", [lambda: Decoder(LLAMA["gqa"]), lambda: Decoder(mixtral_shape(), BALANCE)])
def test_validation_is_the_same_and_keeps_nothing(make: Callable[[], Decoder]) -> None:
    model, one = prepared(make()).eval(), mixed(3, 2, seed=2)
    tokens, labels = numbers(one, model.shape.vocab)
    kernel = strict(choose(CPU, torch.float64, model.shape.head_dim))

    def run(rank: int, comm: ThreadComm) -> float:
        prefixes, total, most = Prefixes(), 0.0, 0
        with torch.no_grad():
            for place in range(len(one.micros)):
                rows = one.rows(rank, place)
                attention = AttentionContext(one.layout(rank, place), comm, kernel, prefixes)
                total += model(tokens[rows], one.positions[rows], labels[rows], attention).item()
                most = max(most, len(prefixes))
        assert most > 0 and len(prefixes) == 0
        return total

    with torch.no_grad():
        expected = model(tokens, one.positions, labels).item()
    assert sum(one.on_ranks(run)) == pytest.approx(expected, rel=TOLERANCE)


def test_a_step_after_one_that_failed_is_the_same() -> None:
    """`run_step` clears the store first; without it, the next step would attend to K,V of the last one."""
    model, one = prepared(Decoder(mixtral_shape(), BALANCE)), mixed(3, 1, seed=2)
    stores = [Prefixes()]

    def fail(loss: Tensor) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        on_ranks(model, one, fail, stores)
    assert len(stores[0]) > 0
    stores[0].clear()
    check(on_ranks(model, one, stores=stores), whole(model, one))


def test_the_loss_of_a_sequence_is_that_of_its_last_slice() -> None:
    """It is known after the last forward pass only. The sum over slices is the loss of the sequence."""
    balance = BALANCE.model_copy(update={"loss_weight": 1.0, "z_weight": 0.0})
    model = prepared(Decoder(mixtral_shape(), balance))
    one = Interleaved((Placed(20, (0,), cut(20, 3)),), 1)
    tokens, labels = numbers(one, model.shape.vocab)
    prefixes, kernel, balancing = Prefixes(), choose(CPU, torch.float64, 8), []
    for place in range(3):
        rows = one.rows(0, place)
        inputs = (tokens[rows], one.positions[rows], labels[rows])
        before = float(model.tally.cross_entropy)
        loss = model(*inputs, AttentionContext(one.layout(0, place), _Nowhere(), kernel, prefixes))
        balancing.append(loss.item() - float(model.tally.cross_entropy) + before)
    assert balancing[:2] == pytest.approx([0, 0], abs=1e-12)
    expected = model(tokens, one.positions, labels) - model.eval()(tokens, one.positions, labels)
    assert balancing[2] == pytest.approx(expected.item(), rel=1e-12)


def test_devices_of_a_tp_group_add_up_to_the_balance_of_one() -> None:
    """Each device has a run of the tokens, which may begin or end inside a slice, and a store of its own."""
    one, layers, experts = Interleaved((Placed(23, (0,), cut(23, 3)), Placed(7, (0,))), 1, seed=1), 2, 4

    def gradients(devices: int) -> tuple[float, list[Tensor]]:
        generator, stores, total = torch.Generator().manual_seed(0), [Prefixes() for _ in range(devices)], 0.0
        losses, every = list[Tensor](), list[Tensor]()
        for place in range(len(one.micros)):
            layout = one.layout(0, place)
            tokens, rows = layout.tokens, -(-layout.tokens // devices)
            logits = torch.randn(layers, tokens, experts, generator=generator, dtype=torch.float64, requires_grad=True)
            chosen = torch.randint(0, experts, (layers, tokens, 2), generator=generator)
            labels = torch.where(torch.rand(tokens, generator=generator) < 0.2, IGNORE, 1)
            every.append(logits)
            shards = AttentionContext(layout, _Nowhere(), KERNEL, stores[0]).shards(CPU)
            routed = [Routed(*of_layer) for of_layer in zip(logits, chosen, strict=True)]
            counts = expert_counts(routed, shards, slice(0, tokens))
            for device, store in enumerate(stores):
                own = slice(min(tokens, device * rows), min(tokens, (device + 1) * rows))
                padded = [Routed(torch.cat((x[own], x.new_zeros(3, experts))), y[own]) for x, y in routed]
                context = AttentionContext(layout, _Nowhere(), KERNEL, store)
                losses.append(load_balancing_loss(padded, counts, labels, shards, own, context))
                total += losses[-1].item()
        torch.stack(losses).sum().backward()
        return total, [logits.grad for logits in every]  # type: ignore[misc]

    loss, expected = gradients(1)
    for devices in (2, 3, 5):
        total, results = gradients(devices)
        assert total == pytest.approx(loss, rel=1e-12)
        assert max(error(a, b) for a, b in zip(results, expected, strict=True)) < 1e-12


class _Nowhere:
    """A transport on which nothing travels."""

    def __init__(self) -> None:
        self.buffers = Buffers()

    def post(self, exchanges: Any) -> Any:
        return SimpleNamespace(wait=lambda: None)


def test_the_balance_of_slices_reads_no_value_of_the_device() -> None:
    """On the meta device, reading a value or the size of a mask fails; on a GPU the host would wait for it."""
    meta, layers, experts = torch.device("meta"), 2, 4
    one, prefixes = Interleaved((Placed(20, (0, 1), cut(20, 3)), Placed(7, (0,))), 2), Prefixes()
    losses, scores = list[Tensor](), list[Tensor]()
    for place in range(len(one.micros)):
        layout = one.layout(0, place)
        context = AttentionContext(layout, _Nowhere(), choose(CPU, torch.float32, 8), prefixes)
        logits = [torch.zeros(layout.tokens, experts, device=meta, requires_grad=True) for _ in range(layers)]
        chosen = torch.zeros(layout.tokens, 2, dtype=torch.int64, device=meta)
        routed = [Routed(of_layer, chosen) for of_layer in logits]
        counts = torch.zeros(len(layout.shards), layers, experts, dtype=torch.int64, device=meta)
        labels = torch.zeros(layout.tokens, dtype=torch.int64, device=meta)
        own, shards = slice(0, layout.tokens), context.shards(meta)
        losses.append(load_balancing_loss(routed, counts, labels, shards, own, context))
        scores += logits
    totals = prefixes.totals(0).counts
    assert isinstance(totals, Tensor) and totals.dtype == torch.int64, "float32 is exact up to 2^24 tokens only"
    for loss in reversed(losses):
        loss.backward()
    assert all(of_layer.grad is not None for of_layer in scores)
