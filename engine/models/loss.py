"""The head and its loss: summed, so that any split of a batch over ranks and micro-batches adds up to the same.

The logits of a few tokens exist at a time: all of them would need more memory than a layer's backward pass.

Letters: T tokens, C hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from engine.close import in_a_line, too_far
from engine.cost.activations import loss_chunk
from engine.data.slices import IGNORE
from engine.dtypes import wider
from engine.models.undrawn import Linear

_LOG = logging.getLogger(__name__)
# Largest error of the self-test, max|a - b| / max|b|: some ten times what rounding the inputs' dtype makes.
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 1e-4, torch.float64: 1e-10}


class Head(Linear):
    """The last linear layer. Its loss is its own, so that whoever gathers its weight for `forward` gathers it there."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the summed loss of labels [T] after x [T,C], or without labels the logits [T,V]."""
        return super().forward(x) if labels is None else head_loss(x, self.weight, labels)


def head_loss(x: Tensor, weight: Tensor, labels: Tensor, ignore: int = IGNORE) -> Tensor:
    """Return the summed cross-entropy in nats of logits x [T,C] times weight [V,C] and labels [T].

    Labels equal to `ignore` count for nothing. Sums are at least float32. With no token, or none that counts, it is a
    zero that is still connected to the graph. One backward pass, which may scale the loss; not differentiable twice.
    """
    return choose(x.device, x.dtype).sum(x, weight, labels, ignore)


def token_loss(logits: Tensor, labels: Tensor, ignore: int = IGNORE) -> Tensor:
    """Return the same of logits [T,V] that exist: the plain form, which others are compared with."""
    wide = logits.to(wider(logits.dtype))
    return F.cross_entropy(wide, labels, ignore_index=ignore, reduction="sum")


@dataclass(frozen=True)
class HeadLoss:
    """A way to form the loss, and why it was chosen; `sum(x, weight, labels, ignore)` as in `head_loss`."""

    name: str
    reason: str
    sum: Callable[[Tensor, Tensor, Tensor, int], Tensor]


@cache
def choose(device: torch.device, dtype: torch.dtype, prefer: str | None = None) -> HeadLoss:
    """Return the loss for a device and dtype, and log the reason once. `prefer` forces one by name.

    One that fails a test on the device is reported and passed over. Raises ValueError for one that does not serve here.
    """
    for offer in _offers(device, dtype):
        if prefer not in (None, offer.name):
            continue
        wrong = _fault(offer, device, dtype)
        if wrong is None:
            _LOG.info("loss for %s: %s (%s)", dtype, offer.name, "asked for" if prefer else offer.reason)
            return offer
        _LOG.warning("loss %s for %s is there but broken, another one is used: %s", offer.name, dtype, wrong)
    raise ValueError(f"no loss {prefer!r} for {dtype} on {device.type}")


def _fault(offer: HeadLoss, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return what is wrong with a loss on a device, or None: two chunks of tokens, beside the plain form in float64."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, 16, generator=generator).to(device, dtype) for size in (1100, 40))
    labels = torch.randint(0, 40, (1100,), generator=generator).to(device)
    labels[::7] = IGNORE
    try:
        found = _three(offer.sum, x, weight, labels)
    except (ImportError, OSError, RuntimeError, AssertionError, AttributeError, TypeError) as failure:
        return in_a_line(failure)
    exact = _three(_plain_sum, x.double(), weight.double(), labels)
    return too_far(zip(("loss", "dx", "dweight"), found, exact, strict=True), TOLERANCE[dtype])


def _three(sum_: Callable[..., Tensor], x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Return a loss, scaled afterwards, and its gradients by x and by the weight."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    with torch.enable_grad():
        loss = sum_(x, weight, labels, IGNORE) * 0.5
    return loss, *torch.autograd.grad(loss, (x, weight))


def _offers(device: torch.device, dtype: torch.dtype) -> list[HeadLoss]:
    """Return the losses that serve, best first.

    PyTorch's (2.13) adds up the loss and the weight's gradient in the input's dtype: in bf16 the sum of 3,000 tokens
    was off by .7 %. On CPU it is no faster than ours, and its first call imports 800 modules for seconds.
    """
    on_gpu, theirs = device.type == "cuda", hasattr(nn, "LinearCrossEntropyOptions")
    wide = dtype in (torch.float32, torch.float64)
    reason = "PyTorch's is no faster and loads for seconds" if wide else f"PyTorch's adds up in {dtype}"
    offers = [HeadLoss("chunks", reason if theirs else "PyTorch has none", _chunked_sum)]
    if wide and theirs:
        offers.insert(0 if on_gpu else 1, HeadLoss("torch", "PyTorch's chunks", _torch_sum))
    if on_gpu and not wide and (fused := _liger()) is not None:
        offers.insert(0, HeadLoss("liger", "Liger is installed", partial(_liger_sum, fused)))
    return [*offers, HeadLoss("plain", "asked for", _plain_sum)]


def _plain_sum(x: Tensor, weight: Tensor, labels: Tensor, ignore: int) -> Tensor:
    return token_loss(F.linear(x, weight), labels, ignore)


def _torch_sum(x: Tensor, weight: Tensor, labels: Tensor, ignore: int) -> Tensor:
    chunk = _chunk(x, weight)
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=chunk, chunking_method=None, acc_policy="compact")
    return F.linear_cross_entropy(x, weight, labels, reduction="sum", ignore_index=ignore, options=options)


def _liger() -> Callable[..., Tensor] | None:
    """Return Liger's fused loss if it is there and can add up in float32."""
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as fused
    except ImportError:
        return None
    return fused if "accum_dtype" in inspect.signature(fused).parameters else None


def _liger_sum(fused: Callable[..., Tensor], x: Tensor, weight: Tensor, labels: Tensor, ignore: int) -> Tensor:
    if len(x) == 0:  # Liger divides by the size of a chunk
        return _chunked_sum(x, weight, labels, ignore)
    return fused(x, weight, labels, ignore_index=ignore, reduction="sum", accum_dtype=torch.float32)


def _chunked_sum(x: Tensor, weight: Tensor, labels: Tensor, ignore: int) -> Tensor:
    return _ChunkedLoss.apply(x, weight, labels, ignore, torch.is_grad_enabled())  # type: ignore[no-any-return]


class _ChunkedLoss(torch.autograd.Function):
    """Gradients are formed with the loss, from the same logits, and scaled in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, ignore: int, graded: bool) -> Tensor:
        ctx.dtype, ctx.gradients = weight.dtype, None
        if not x.is_cuda:  # only GPUs multiply bf16 and give float32
            weight = weight.to(wider(weight.dtype))
        loss, dx, dweight = _accumulate(x, weight, labels, ignore, graded)
        ctx.gradients = (dx, dweight) if graded else None
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        (dx, dweight), ctx.gradients = ctx.gradients, None
        return dx.mul_(dloss), dweight.mul_(dloss).to(ctx.dtype), None, None, None


def _accumulate(x: Tensor, weight: Tensor, labels: Tensor, ignore: int, graded: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss and its gradients by x, in its dtype, and by the weight, in the wider one: zeros if not asked."""
    loss = x.new_zeros((), dtype=wider(x.dtype))
    dx = x.new_zeros(x.shape if graded else 0)
    dweight = x.new_zeros(weight.shape if graded else 0, dtype=wider(x.dtype))
    chunk = _chunk(x, weight)
    for start in range(0, len(x), chunk):
        rows = slice(start, start + chunk)
        gradients = (dx[rows], dweight) if graded else None
        loss += _add_chunk(x[rows].to(weight.dtype), weight, labels[rows], ignore, gradients)
    return loss, dx, dweight


def _add_chunk(
    x: Tensor, weight: Tensor, labels: Tensor, ignore: int, gradients: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Return the loss of a chunk of tokens; write its gradient by x and add that by the weight.

    A function of its own: what it allocates must be gone before the next chunk's logits.
    """
    logs = torch.log_softmax(_product(x, weight.T), dim=-1)
    loss = F.nll_loss(logs, labels, ignore_index=ignore, reduction="sum")
    if gradients is not None:
        dx, dweight = gradients
        dlogits = _dlogits(logs, labels, ignore).to(x.dtype)
        dx.copy_(dlogits @ weight)
        _add_product(dweight, dlogits.T, x)
    return loss


def _dlogits(logs: Tensor, labels: Tensor, ignore: int) -> Tensor:
    """Turn log-probabilities into the loss's gradient by the logits, in place: p - 1 at the label, p elsewhere."""
    counts = (labels != ignore)[:, None]
    ones = counts.to(logs.dtype)
    return logs.exp_().mul_(ones).scatter_add_(1, labels[:, None].where(counts, 0), -ones)


def _chunk(x: Tensor, weight: Tensor) -> int:
    return loss_chunk(tokens=len(x), hidden=x.shape[1], vocab=len(weight))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a times b in the wider dtype."""
    return a @ b if a.dtype == wider(a.dtype) else torch.mm(a, b, out_dtype=wider(a.dtype))


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a times b to `total`, which is in the wider dtype."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
