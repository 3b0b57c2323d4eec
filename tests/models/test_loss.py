"""The summed token loss: parts of a batch must add up to the same, whatever the parts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from engine.data.slices import IGNORE
from engine.models.loss import token_loss


def example(tokens: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    logits = torch.randn(tokens, 11, generator=generator, dtype=torch.float64).to(dtype)
    return logits.requires_grad_(), torch.randint(0, 11, (tokens,), generator=generator)


def test_it_is_the_sum_of_minus_log_of_softmax() -> None:
    logits, labels = example(7)
    rows = logits.detach().tolist()
    expected = sum(
        math.log(sum(map(math.exp, row))) - row[label] for row, label in zip(rows, labels.tolist(), strict=True)
    )
    assert token_loss(logits, labels).item() == pytest.approx(expected, rel=1e-13)


def test_parts_add_up() -> None:
    logits, labels = example(9)
    parts = sum(token_loss(logits[part], labels[part]) for part in (slice(0, 4), slice(4, 4), slice(4, 9)))
    torch.testing.assert_close(parts, token_loss(logits, labels), rtol=1e-14, atol=0)


def test_ignored_labels_count_for_nothing() -> None:
    logits, labels = example(6)
    kept = torch.tensor([True, False, True, True, False, True])
    loss = token_loss(logits, labels.masked_fill(~kept, IGNORE))
    torch.testing.assert_close(loss, token_loss(logits[kept], labels[kept]), rtol=1e-14, atol=0)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert (gradient[~kept] == 0).all() and (gradient[kept] != 0).all()


@pytest.mark.parametrize(
    ("dtype", "inside"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_it_is_summed_in_the_wider_dtype(dtype: torch.dtype, inside: torch.dtype) -> None:
    """In bf16 a sum of thousands of tokens would stop growing."""
    logits, labels = example(3000, dtype)
    loss = token_loss(logits, labels)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert (loss.dtype, gradient.dtype) == (inside, dtype)
    exact = token_loss(logits.detach().double(), labels)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-6 if inside == torch.float32 else 1e-14)


@pytest.mark.parametrize("tokens", [0, 3])
def test_without_a_loss_token_it_is_a_zero_still_connected(tokens: int) -> None:
    """A rank without work must run the backward pass all the same, and change nothing."""
    logits, _ = example(tokens)
    loss = token_loss(logits, torch.full((tokens,), IGNORE))
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.item() == 0 and (gradient == 0).all() and gradient.shape == logits.shape
