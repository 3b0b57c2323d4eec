"""Tensor parallelism with sequence parallelism (Korthikanti et al. 2022, section 4.2): one layer on several devices.

Each device of a tp group has a slice of every matrix, and works for a slice of the heads, the inner width and the
vocabulary. Between these parts it has only its own rows of the residual stream: tokens are cut into as many equal runs
as there are devices, and the last ones are padded with rows of zeros.

```
 forward    own rows -> norm -> gather -> q, k, v -> attention on own heads -> out -> reduce-scatter -> own rows
 backward   own rows <- norm <- reduce-scatter <- q, k, v <-       ...       <- out <- gather         <- own rows
```
A router decides for the own rows. With the rows, the chosen experts and their weights are gathered, and every device
works for a slice of the width of every expert.

The gathered rows are not kept for the backward pass: it gathers them again, so that a device saves 1 / tp of the bytes
of a layer, as `engine.cost.activations` assumes.

All devices of the group must call the same operations in the same order. They all have the same tokens and labels.

Letters: T tokens of the micro-batch, R rows of one device, ceil(T / tp), C hidden size, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from engine.dtypes import wider
from engine.models.common.attention import Attention
from engine.models.common.loss import Head, chunked_loss
from engine.models.common.norm import RMSNorm
from engine.models.common.op import Op
from engine.models.common.part import Rows
from engine.models.common.skip_init import Embedding, Linear
from engine.models.common.swiglu import FeedForward
from engine.models.decoder import Decoder
from engine.models.experts.layer import Experts, LocalRoute, Router
from engine.parallel.collectives import all_gather_single, reduce_scatter_single


class TensorParallel(Rows):
    """The collectives of a tp group, and the operations of a model's modules that need them."""

    def __init__(self, group: dist.ProcessGroup, vocab: int) -> None:
        """`vocab` is the number of tokens of the whole vocabulary."""
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self._group, self._vocab = group, vocab

    def apply(self, model: nn.Module) -> None:
        """Set the operations of a model's modules. The model must have been created with a `Part` of this tp degree."""
        for module in model.modules():
            if isinstance(module, (Attention, FeedForward)):
                module.enter, module.leave = self.enter, self.leave
                for linear in module.children():
                    if isinstance(linear, Linear):
                        linear.product = TensorProduct(**vars(linear.product))
            elif isinstance(module, (RMSNorm, Router)):
                module.shared = self.shared
            elif isinstance(module, Embedding):
                module.lookup = self.lookup
            elif isinstance(module, Head):
                module.enter, module.loss = self.enter, partial(chunked_loss, of_logits=self.logits_loss)
            elif isinstance(module, Experts):
                module.route = partial(TensorRoute, self)
            elif isinstance(module, Decoder):
                module.rows = self

    def rows(self, tokens: int) -> int:
        """Return the number of rows of each device, R, for a micro-batch of `tokens` tokens."""
        return -(-tokens // self.size)

    def own(self, tokens: int) -> slice:
        """Return the tokens, of `tokens`, whose rows this device has. Rows after them are padding."""
        rows = self.rows(tokens)
        return slice(min(tokens, self.rank * rows), min(tokens, (self.rank + 1) * rows))

    def sum(self, counts: Tensor) -> Tensor:
        """Sum integers over the devices, in place, and return them."""
        if counts.numel():
            dist.all_reduce(counts, group=self._group)
        return counts

    def total(self, share: Tensor) -> Tensor:
        """Sum a scalar over the devices. The gradient of a device's share is that of the sum."""
        return _Total.apply(share, self._group)  # type: ignore[no-any-return]

    def enter(self, x: Tensor, tokens: int | None = None) -> Tensor:
        """Gather the rows x [R,C] of all devices: [tokens,C], or with padding [R tp,C] if `tokens` is None.

        In the backward pass gradients are summed over the devices, and each gets those of its own rows.
        """
        return _Enter.apply(x, tokens, self)  # type: ignore[no-any-return]

    def leave(self, x: Tensor) -> Tensor:
        """Sum x [T,C] over the devices, and return the own rows of the sum, [R,C]."""
        return _Leave.apply(x, self)  # type: ignore[no-any-return]

    def shared(self, weight: Tensor) -> Tensor:
        """Return a weight that is whole on every device and is applied to own rows: its gradient is summed."""
        return _Shared.apply(weight, self._group)  # type: ignore[no-any-return]

    def lookup(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Return this device's rows [R,C] of the embedding of `tokens` [T]. `weight` is its slice of the vocabulary."""
        here = tokens - self.rank * len(weight)
        inside = (here >= 0) & (here < len(weight))
        return self.leave(F.embedding(here.where(inside, 0), weight) * inside[:, None])

    def logits_loss(self, logits: Tensor, labels: Tensor, ignore: int) -> tuple[Tensor, Tensor]:
        """Compute the summed cross-entropy of `logits` [T, slice of V], and the gradient of the logits.

        Overwrites `logits`. The loss is the same on all devices.
        """
        first, width = self.rank * logits.shape[1], logits.shape[1]
        logits[:, max(0, self._vocab - first) :] = -torch.inf  # rows that pad the vocabulary
        largest = logits.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, self._group)
        powers = logits.sub_(largest[:, None])
        counts, here = labels != ignore, labels - first
        inside = counts & (here >= 0) & (here < width)
        place = here.where(inside, 0)[:, None]
        of_label = powers.gather(1, place)[:, 0].where(inside, 0)
        sums = torch.stack((powers.exp_().sum(-1), of_label))
        dist.all_reduce(sums, group=self._group)
        total, of_label = sums
        loss = ((total.log() - of_label) * counts).sum()
        # The gradient is p - 1 at the label, p elsewhere, and 0 for a token that does not count.
        dlogits = powers.mul_((counts / total)[:, None]).scatter_add_(1, place, -inside[:, None].to(powers.dtype))
        return loss, dlogits

    def gather(self, x: Tensor) -> Tensor:
        """Gather the rows x [R,...] of all devices, in their order: [R tp,...]."""
        out = x.new_empty((self.size * len(x), *x.shape[1:]))
        if out.numel():
            all_gather_single(out, x.contiguous(), group=self._group)
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum x [T,...] over the devices and return the own rows of the sum: [R,...]. T may be that with padding."""
        rows = self.rows(len(x))
        if padding := rows * self.size - len(x):
            x = torch.cat([x, x.new_zeros((padding, *x.shape[1:]))])
        out = x.new_empty((rows, *x.shape[1:]))
        if out.numel():
            reduce_scatter_single(out, x.contiguous(), group=self._group)
        return out


class TensorRoute(LocalRoute):
    """The route of the rows of all devices of a tp group, each of which has a slice of every expert.

    The rows of the padding are 0, and so are their results.
    """

    def __init__(self, tensor: TensorParallel, chosen: Tensor, experts: int, known: None) -> None:
        """`chosen`, int64 [R,k], are the experts of this device's rows, of `experts` in all."""
        super().__init__(tensor.gather(chosen), experts, known)
        self._tensor = tensor

    def spread(self, x: Tensor) -> Tensor:
        """Return the rows [N,C] of all devices' x [R,C]."""
        return super().spread(self._tensor.gather(x))

    def collect(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Add the rows [N,C] of each token, over the devices too: the own rows of the sum, [R,C] in `dtype`."""
        return self._tensor.reduce_scatter(super().collect(rows, dtype))

    def spread_weights(self, weights: Tensor) -> Tensor:
        """Return the weight of each row, [N], of all devices' `weights` [R,k]."""
        return super().spread_weights(self._tensor.gather(weights))

    def collect_weights(self, weights: Tensor) -> Tensor:
        """Add `weights` [N] over the devices, and return those of the own rows, [R,k]."""
        return self._tensor.reduce_scatter(super().collect_weights(weights))


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = share.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor, None]:
        return dtotal, None


class _Enter(torch.autograd.Function):
    """Saves the own rows; `_Product` reads them from this node, gathers them again, and shares the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: int | None, tensor: TensorParallel) -> Tensor:
        ctx.save_for_backward(x)
        ctx.tensor, ctx.tokens, ctx.products, ctx.gathered = tensor, tokens, 0, None
        return tensor.gather(x)[:tokens]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
        return ctx.tensor.reduce_scatter(dout), None, None


class TensorProduct(Op):
    """A product of any kind that does not save x for the backward pass if it is the result of `TensorParallel.enter`.

    It has the functions of the product that it is around.
    """

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Compute the product of x [T,I] and this device's slice of a weight."""
        if not isinstance(x.grad_fn, _Enter._backward_cls):
            return super().__call__(x, weight)
        return _Product.apply(x, weight, x.grad_fn, self)  # type: ignore[no-any-return]


class _Product(torch.autograd.Function):
    """A product of gathered rows. In the backward pass, the first product of the rows gathers them again, and the last
    one frees them. `enter` is the node of `_Enter` that gathered them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, enter: Any, product: Op) -> Tensor:
        out, *kept = product.forward(x, weight)
        ctx.weight = weight if 1 in product.referenced else None
        ctx.save_for_backward(*([weight] if ctx.weight is None else []), *kept)
        ctx.enter, ctx.product = enter, product
        enter.products += 1
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        enter = ctx.enter
        weight, *kept = ctx.saved_tensors if ctx.weight is None else (ctx.weight, *ctx.saved_tensors)
        if enter.gathered is None:
            enter.gathered = enter.tensor.gather(*enter.saved_tensors)[: enter.tokens]
        inputs = enter.gathered, weight
        enter.products -= 1
        if not enter.products:
            enter.gathered = None
        return *ctx.product.backward(dout, *(inputs[number] for number in ctx.product.keeps), *kept), None, None


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dweight: Tensor) -> tuple[Tensor, None]:
        total = dweight.to(wider(dweight.dtype), copy=True)
        dist.all_reduce(total, group=ctx.group)
        return total.to(dweight.dtype), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorParallel) -> Tensor:
        ctx.tensor, ctx.tokens = tensor, len(x)
        return tensor.reduce_scatter(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return ctx.tensor.gather(dout)[: ctx.tokens], None
