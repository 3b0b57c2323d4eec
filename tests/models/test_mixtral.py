"""The model's losses against sums over unsplit sequences; test_huggingface.py compares the rest with Hugging Face's.

If these fail, experts are balanced by something else. Error of a tensor = max|a - b| / max|b|.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engine.attention.context import AttentionContext
from engine.attention.kernels.choice import choose
from engine.attention.layout import idle, layout
from engine.close import error
from engine.config.load import load
from engine.config.schema import Balance
from engine.data.inputs import IGNORE
from engine.models.build import build_model
from engine.models.common.initialise import initialise
from engine.models.common.loss import token_loss
from engine.models.decoder import Decoder
from engine.models.experts.balance import z_loss
from engine.models.experts.layer import Routed
from engine.planner.plan.step_plan import MicroBatch, Shard
from tests.models.shapes import mixtral_shape

CPU = torch.device("cpu")
TOKENS = 67
BALANCE = Balance(by="loss", loss_weight=0.3, bias_rate=0.05, z_weight=0.02)


def attention_of(*lengths: int, dtype: torch.dtype = torch.float64) -> AttentionContext:
    shards = tuple(Shard(number, length, (0,), 0) for number, length in enumerate(lengths))
    return AttentionContext(layout(MicroBatch(0, 0, 0, -1, shards)), None, choose(CPU, dtype, 8))


def initialised(balance: Balance | None, seed: int = 3, **changes: object) -> Decoder:
    model = Decoder(mixtral_shape(**changes), balance).double()
    initialise(model, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.dim() > 1 else 1)
    return model


def routes(model: Decoder, tokens: Tensor) -> list[Routed]:
    """Return what each layer routed of one unsplit sequence."""
    return model.hidden(tokens, torch.arange(len(tokens)), attention_of(len(tokens)))[1]


def balance_of(routed: Sequence[Routed]) -> Tensor:
    """Return the balance loss of one unsplit sequence, all layers, as it is defined."""
    total = torch.zeros((), dtype=torch.float64)
    for logits, chosen in routed:
        experts = logits.shape[1]
        for expert in range(experts):
            f = (chosen == expert).double().mean()
            p = logits.softmax(-1)[:, expert].mean()
            total = total + experts * f * p
    return total


def brute_force(model: Decoder, sequences: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the summed loss of (tokens, labels), each sequence by itself, each term as it is defined."""
    assert model.balance is not None
    total = torch.zeros((), dtype=torch.float64)
    for tokens, labels in sequences:
        loss_tokens = int((labels != IGNORE).sum())
        x, routed = model.hidden(tokens, torch.arange(len(tokens)), attention_of(len(tokens)))
        total = total + model.head(model.norm(x), labels)
        for logits, _ in routed:
            z = (logits.exp().sum(-1).log() ** 2)[labels != IGNORE].sum()
            total = total + model.balance.z_weight * z
        if model.balance.by == "loss":
            total = total + model.balance.loss_weight * loss_tokens * balance_of(routed)
    return total


def some_sequences() -> list[tuple[Tensor, Tensor]]:
    """Several lengths; one has labels that are ignored, another no label at all."""
    generator = torch.Generator().manual_seed(5)
    sequences = [torch.randint(0, 50, (2, length), generator=generator) for length in (1, 17, 30, 2, 9)]
    sequences[2][1, :11], sequences[4][1] = IGNORE, IGNORE
    return [(tokens, labels) for tokens, labels in sequences]


@pytest.mark.parametrize("by", ["none", "loss", "bias"])
def test_packed_sequences_have_the_losses_of_each_by_itself(by: str) -> None:
    model, sequences = initialised(BALANCE.model_copy(update={"by": by})), some_sequences()
    lengths = [len(tokens) for tokens, _ in sequences]
    tokens, labels = (torch.cat(parts) for parts in zip(*sequences, strict=True))
    positions = torch.cat([torch.arange(length) for length in lengths])
    loss, expected = model(tokens, positions, labels, attention_of(*lengths)), brute_force(model, sequences)
    assert abs(loss.item() / expected.item() - 1) < 1e-13
    found, wanted = (torch.autograd.grad(value, list(model.parameters())) for value in (loss, expected))
    assert max(error(a, b) for a, b in zip(found, wanted, strict=True)) < 1e-12


def test_an_even_router_has_a_balance_loss_of_one_a_layer() -> None:
    model = initialised(BALANCE.model_copy(update={"loss_weight": 1.0, "z_weight": 0.0}))
    with torch.no_grad():
        for experts in model.experts():
            experts.router.weight.zero_()
    tokens = torch.arange(20)
    loss = model(tokens, tokens, tokens, attention_of(20))
    more = loss - model.eval()(tokens, tokens, tokens, attention_of(20))
    assert more.item() == pytest.approx(2 * 20)


def test_validation_is_the_cross_entropy_alone() -> None:
    model, tokens = initialised(BALANCE), torch.arange(20)
    logits = model(tokens, tokens, attention=attention_of(20))
    trained = model(tokens, tokens, tokens, attention_of(20))
    model.eval()
    validated = model(tokens, tokens, tokens, attention_of(20))
    assert torch.equal(validated, token_loss(logits, tokens)) and trained > validated


def test_z_loss_of_one_token_by_hand() -> None:
    logits = torch.tensor([[1.0, 2.0], [3.0, -1.0]], dtype=torch.float64)
    chosen = torch.zeros(2, 1, dtype=torch.int64)
    expected = torch.log(torch.tensor(1.0).double().exp() + torch.tensor(2.0).double().exp()) ** 2
    labels = torch.tensor([4, IGNORE])
    assert z_loss([Routed(logits, chosen)] * 3, labels).item() == pytest.approx(3 * expected.item())


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("by", ["none", "loss", "bias"])
def test_an_idle_micro_batch_counts_for_nothing(by: str, tokens: int) -> None:
    model = initialised(BALANCE.model_copy(update={"by": by}))
    attention = AttentionContext(idle(tokens), None, choose(CPU, torch.float64, 8))
    loss = model(torch.zeros(tokens).long(), torch.zeros(tokens).long(), torch.full((tokens,), IGNORE), attention)
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is not None and (p.grad == 0).all() for p in model.parameters())
    assert isinstance(model.tally.expert_counts, Tensor) and int(model.tally.expert_counts.sum()) == 0


def test_biases_move_by_the_sign_of_what_is_missing() -> None:
    """And only the choice sees them: with all others far below, the k chosen have the largest bias."""
    model = initialised(BALANCE.model_copy(update={"by": "bias"}))
    tokens = torch.arange(40)
    metrics, counts = {}, None
    for _ in range(3):
        model(tokens, tokens, tokens, attention_of(40))
        counts = model.tally.expert_counts
        before = torch.stack([experts.bias.clone() for experts in model.experts()])
        metrics = model.end_step(lambda values: 2 * values, loss_tokens=80)  # another rank counted the same
        moved = torch.stack([experts.bias for experts in model.experts()]) - before
        assert torch.equal(moved, torch.sign(counts.sum(1, keepdim=True) - 8 * counts))
    assert metrics["busiest_expert"] == pytest.approx(float(counts.max()) * 8 / 80)
    assert 0 < metrics["cross_entropy"] < 10
    experts = model.experts()[0]
    experts.bias.copy_(torch.tensor([0, 0, 1000, 0, 0, 1000, 0, 0]))
    routed = routes(model, tokens)[0]
    assert set(routed.chosen.flatten().tolist()) == {2, 5}
    assert model.end_step(lambda values: values, 1) == {}, "no micro-batch, nothing to tell"


def test_biases_balance_the_load() -> None:
    """On the same tokens again and again, the busiest expert comes down to nearly the mean."""
    model = initialised(BALANCE.model_copy(update={"by": "bias", "bias_rate": 0.004}))
    tokens = torch.randint(0, 50, (200,), generator=torch.Generator().manual_seed(0))
    busiest = []
    for _ in range(100):
        with torch.no_grad():
            model(tokens, torch.arange(200), tokens, attention_of(200))
        busiest.append(model.end_step(lambda values: values, 200)["busiest_expert"])
    assert busiest[0] > 1.8 and max(busiest[-5:]) < 1.3, busiest


def test_a_bias_is_saved_and_no_dtype_rounds_it() -> None:
    model = Decoder(mixtral_shape(), BALANCE.model_copy(update={"by": "bias"}))
    model.experts()[0].bias += 70_001
    again = Decoder(mixtral_shape(), BALANCE.model_copy(update={"by": "bias"})).bfloat16()
    again.load_state_dict(model.bfloat16().state_dict())
    assert again.experts()[0].bias.tolist() == [70_001] * 8


def test_a_config_chooses_the_model() -> None:
    dense = build_model(load([]))
    assert not dense.experts() and not dense.routed_layers
    sparse = build_model(load(["model.family=mixtral", "model.experts=4", "model.top_k=2", "balance.by=bias"]))
    assert len(sparse.experts()) == 2 and sparse.balance is not None and sparse.balance.by == "bias"
