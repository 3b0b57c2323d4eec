"""The head and its loss. The loss is a sum over tokens, so it can be added over ranks and micro-batches.

It is computed in chunks of tokens: the logits of all tokens would need more memory than the backward pass of a layer.

Letters: T tokens, C hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from engine.close import mismatch
from engine.cost.activations import loss_chunk
from engine.data.inputs import IGNORE
from engine.dtypes import wider
from engine.models.common.part import Enter, as_it_is
from engine.models.common.product import add_product
from engine.models.common.skip_init import Linear
from engine.selection import Candidate, Selected, select

# Largest allowed error max|a - b| / max|b| in the self-test: about ten times the rounding error of the inputs' dtype.
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 1e-4, torch.float64: 1e-10}

# (x [T,C], weight [V,C], labels [T], label to ignore) -> summed loss
HeadLoss = Callable[[Tensor, Tensor, Tensor, int], Tensor]
# (logits [T,V], labels [T], label to ignore) -> summed loss, and the gradient of the logits; overwrites the logits
LogitsLoss = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


def head_loss(x: Tensor, weight: Tensor, labels: Tensor, ignore: int = IGNORE) -> Tensor:
    """Compute the summed cross-entropy in nats of the logits x [T,C] @ weight [V,C].T and labels [T].

    The result is a scalar in at least float32. Labels equal to `ignore` do not count; if none counts, the result is a
    zero that is connected to the autograd graph. Supports one backward pass and no second derivative.
    """
    return choose(x.device, x.dtype).implementation(x, weight, labels, ignore)


class Head(Linear):
    """The last linear layer. It also computes the loss, because ZeRO-3 gathers its weight only for its `forward`."""

    # Tensor parallelism replaces these two.
    enter: Enter = staticmethod(as_it_is)
    loss: Callable[[Tensor, Tensor, Tensor], Tensor] = staticmethod(head_loss)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """Compute the logits [T,V] of x [T,C]; with `labels` [T], the summed cross-entropy instead."""
        if labels is None:
            return super().forward(x)
        return self.loss(self.enter(x, len(labels)), self.weight, labels)


def token_loss(logits: Tensor, labels: Tensor, ignore: int = IGNORE) -> Tensor:
    """Compute the summed cross-entropy of logits [T,V] and labels [T] in plain PyTorch, as a reference."""
    wide = logits.to(wider(logits.dtype))
    return F.cross_entropy(wide, labels, ignore_index=ignore, reduction="sum")


@cache
def choose(device: torch.device, dtype: torch.dtype, prefer: str | None = None) -> Selected[HeadLoss]:
    """Select the implementation of `head_loss` for a device and dtype, and log the reason. Cached.

    With `prefer`, tries only the implementation of this name; raises ValueError if it is unknown or does not work here.
    """
    return select(f"loss implementation for {dtype}", candidates(device, dtype), prefer)


def candidates(device: torch.device, dtype: torch.dtype) -> list[Candidate[HeadLoss]]:
    """Return all implementations of `head_loss`, in order of preference."""
    on_gpu, narrow = device.type == "cuda", dtype not in (torch.float32, torch.float64)
    test = partial(fault, device=device, dtype=dtype)
    # PyTorch's implementation (2.13) sums the loss and the weight's gradient in the dtype of its inputs: in bf16 the
    # sum over 3,000 tokens was off by 0.7 %. On a CPU it is not faster than ours, and its first call takes seconds to
    # import 800 modules.
    unsupported = f"accumulates in {dtype}" if narrow else None
    if not hasattr(nn, "LinearCrossEntropyOptions"):
        unsupported = "not in this version of PyTorch"
    liger_unsupported = None if on_gpu and narrow else "for bf16 and fp16 on CUDA devices only"
    liger: Candidate[HeadLoss] = Candidate(
        "liger", "Liger is installed", _load_liger, test, liger_unsupported, "liger_kernel"
    )
    pytorch: Candidate[HeadLoss] = Candidate("torch", "PyTorch's chunks", lambda: _torch_loss, test, unsupported)
    chunks: Candidate[HeadLoss] = Candidate("chunks", "accumulates in at least float32", lambda: chunked_loss, test)
    plain: Candidate[HeadLoss] = Candidate("plain", "no other implementation works here", lambda: _plain_loss)
    return [liger, pytorch, chunks, plain] if on_gpu else [chunks, liger, pytorch, plain]


def fault(loss: HeadLoss, device: torch.device, dtype: torch.dtype) -> str | None:
    """Compare an implementation's loss and gradients with the plain implementation in float64, on 1,100 tokens.

    Returns a description of the first mismatch, or None.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, 16, generator=generator).to(device, dtype) for size in (1100, 40))
    labels = torch.randint(0, 40, (1100,), generator=generator).to(device)
    labels[::7] = IGNORE

    def loss_and_gradients(function: HeadLoss, dtype: torch.dtype) -> tuple[Tensor, ...]:
        x_, weight_ = (tensor.detach().to(dtype).requires_grad_() for tensor in (x, weight))
        with torch.enable_grad():
            loss = function(x_, weight_, labels, IGNORE) * 0.5
        return loss, *torch.autograd.grad(loss, (x_, weight_))

    found, expected = loss_and_gradients(loss, dtype), loss_and_gradients(_plain_loss, torch.float64)
    return mismatch(zip(("loss", "dx", "dweight"), found, expected, strict=True), TOLERANCE[dtype])


def _plain_loss(x: Tensor, weight: Tensor, labels: Tensor, ignore: int) -> Tensor:
    return token_loss(F.linear(x, weight), labels, ignore)


def _torch_loss(x: Tensor, weight: Tensor, labels: Tensor, ignore: int) -> Tensor:
    chunk = loss_chunk(tokens=len(x), hidden=x.shape[1], vocab=len(weight))
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=chunk, chunking_method=None, acc_policy="compact")
    return F.linear_cross_entropy(x, weight, labels, reduction="sum", ignore_index=ignore, options=options)


def _load_liger() -> HeadLoss:
    """Import Liger's fused loss. Raises ImportError if it is not installed, or too old to accumulate in float32."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as fused

    if "accum_dtype" not in inspect.signature(fused).parameters:
        raise ImportError("too old to accumulate in float32")

    def liger_loss(x: Tensor, weight: Tensor, labels: Tensor, ignore: int) -> Tensor:
        if len(x) == 0:  # Liger would divide by zero
            return chunked_loss(x, weight, labels, ignore)
        loss: Tensor = fused(x, weight, labels, ignore_index=ignore, reduction="sum", accum_dtype=torch.float32)
        return loss

    return liger_loss


def logits_loss(logits: Tensor, labels: Tensor, ignore: int) -> tuple[Tensor, Tensor]:
    """Compute the summed cross-entropy of logits [T,V] and labels [T], and the gradient of the logits [T,V]."""
    logs = torch.log_softmax(logits, dim=-1)
    loss = F.nll_loss(logs, labels, ignore_index=ignore, reduction="sum")
    # Replace the log-probabilities by the gradient of the logits: p - 1 at the label, p elsewhere, 0 if ignored.
    counts = (labels != ignore)[:, None]
    ones = counts.to(logs.dtype)
    return loss, logs.exp_().mul_(ones).scatter_add_(1, labels[:, None].where(counts, 0), -ones)


def chunked_loss(
    x: Tensor, weight: Tensor, labels: Tensor, ignore: int = IGNORE, of_logits: LogitsLoss = logits_loss
) -> Tensor:
    """Compute `head_loss` with our own implementation. `of_logits` is called for each chunk of tokens, in order."""
    return _ChunkedLoss.apply(x, weight, labels, ignore, torch.is_grad_enabled(), of_logits)  # type: ignore[no-any-return]


class _ChunkedLoss(torch.autograd.Function):
    """Computes the gradients in the forward pass, while the logits of each chunk exist; the backward pass only scales
    them. `graded` says whether gradients are needed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, ignore: int, graded: bool, of_logits: LogitsLoss
    ) -> Tensor:
        ctx.dtype, ctx.gradients, wide = weight.dtype, None, wider(x.dtype)
        if not x.is_cuda:  # only GPUs multiply bf16 to float32
            weight = weight.to(wide)
        loss = x.new_zeros((), dtype=wide)
        dx = x.new_zeros(x.shape if graded else 0)
        dweight = x.new_zeros(weight.shape if graded else 0, dtype=wide)
        chunk = loss_chunk(tokens=len(x), hidden=x.shape[1], vocab=len(weight))
        for start in range(0, len(x), chunk):
            rows = slice(start, start + chunk)
            gradients = (dx[rows], dweight) if graded else None
            loss += _add_chunk(x[rows].to(weight.dtype), weight, labels[rows], ignore, gradients, of_logits)
        ctx.gradients = (dx, dweight) if graded else None
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        (dx, dweight), ctx.gradients = ctx.gradients, None
        return dx.mul_(dloss), dweight.mul_(dloss).to(ctx.dtype), None, None, None, None


def _add_chunk(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignore: int,
    gradients: tuple[Tensor, Tensor] | None,
    of_logits: LogitsLoss,
) -> Tensor:
    """Compute the summed loss of a chunk of tokens, and its gradients unless `gradients` is None.

    Writes the gradient with respect to x into `gradients[0]`, and adds the gradient with respect to the weight to
    `gradients[1]`, which is in the wider dtype.

    A separate function, so that its tensors are freed before the logits of the next chunk are allocated.
    """
    wide = wider(x.dtype)
    logits = x @ weight.T if x.dtype == wide else torch.mm(x, weight.T, out_dtype=wide)
    loss, dlogits = of_logits(logits, labels, ignore)
    del logits
    if gradients is not None:
        dx, dweight = gradients
        dlogits = dlogits.to(x.dtype)
        dx.copy_(dlogits @ weight)
        add_product(dweight, dlogits.T, x)
    return loss
