"""A mixture-of-experts feed-forward layer: a router chooses k experts for each token, and no token is dropped.

A device routes its own tokens. A `Route` then makes one row of each (token, expert) pair, sorted by expert, and adds
the results of a token's rows. Under tensor and expert parallelism it also communicates, and the weights of the chosen
experts travel with the tokens: so the gradient of the router needs nothing else.

Rows are made again in the backward pass, and the outputs of the experts are not needed there. With h the row's hidden
values, w its weight and dout the gradient of the token, the gradient of w is h . g with g = dout @ down, and that of h
is w * g. So per row only the outputs of `gate` and `up` and their product are saved.

Letters: T tokens of this device, C hidden size, E experts, k experts per token, F width of an expert, N rows.

The weights of all experts are stacked into one parameter per projection. If each expert were a module, ZeRO-3 would
gather experts in an order that depends on the data, and an expert that no token chose would have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from engine.config.schema import Balance, Model
from engine.models.common.op import Op
from engine.models.common.part import as_it_is
from engine.models.common.pointwise import SWIGLU
from engine.models.common.product import WIDE
from engine.models.common.recomputed import stored_decisions
from engine.models.common.skip_init import Linear
from engine.models.common.tiles import in_tiles
from engine.models.experts.grouped import PRODUCTS, Products


class Routed(NamedTuple):
    """The decisions of a router for T tokens."""

    logits: Tensor  # [T,E] in at least float32
    chosen: Tensor  # int64 [T,k], the experts of each token


class Router(Linear):
    """Scores the experts in at least float32: in bf16 similar scores would be equal, and the choice arbitrary.

    It is a module, so that ZeRO-3 gathers its weight for `forward`.
    """

    product = WIDE
    shared: Callable[[Tensor], Tensor] = staticmethod(as_it_is)  # tensor parallelism replaces it

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logits [T,E] of x [T,C]."""
        return self.product(x, self.shared(self.weight))


class Route(Protocol):
    """Moves tokens to the rows of their experts, and back.

    `collect` is the transpose of `spread`, so each is the gradient of the other. Autograd's own gradient of indexing is
    slower and not deterministic, because it adds rows in an unspecified order.
    """

    @property
    def counts(self) -> Tensor:
        """int64, the rows of each expert of this device."""

    @property
    def known(self) -> Any:
        """Small: what the next route of the same tokens takes, to be built without waiting."""

    def spread(self, x: Tensor) -> Tensor:
        """Return the rows [N,C] of the tokens x [T,C], one for each chosen expert, sorted by expert."""

    def collect(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Add the rows [N,C] of each token: [T,C] in `dtype`."""

    def spread_weights(self, weights: Tensor) -> Tensor:
        """Return the weight of each row, [N], of `weights` [T,k]."""

    def collect_weights(self, weights: Tensor) -> Tensor:
        """Return `weights` [N] of the rows by token, [T,k]."""


class LocalRoute:
    """The route of tokens whose experts are all on this device."""

    known = None

    def __init__(self, chosen: Tensor, experts: int, known: None = None) -> None:
        """`chosen`, int64 [T,k], are the experts of each token, of `experts` in all."""
        self._expert, self._experts, self._top_k = chosen.flatten(), experts, chosen.shape[1]

    @cached_property
    def counts(self) -> Tensor:
        return count_each(self._expert, self._experts)

    @cached_property
    def _order(self) -> Tensor:
        return self._expert.argsort(stable=True)

    @cached_property
    def _token(self) -> Tensor:
        return self._order // self._top_k

    @cached_property
    def _inverse(self) -> Tensor:
        return self._order.argsort()

    def spread(self, x: Tensor) -> Tensor:
        """Return the rows [N,C] of the tokens x [T,C], one for each chosen expert, sorted by expert."""
        return x[self._token]

    def collect(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Add the rows [N,C] of each token: [T,C] in `dtype`."""
        return self._by_token(rows).sum(1).to(dtype)

    def spread_weights(self, weights: Tensor) -> Tensor:
        """Return the weight of each row, [N], of `weights` [T,k]."""
        return weights.flatten()[self._order]

    def collect_weights(self, weights: Tensor) -> Tensor:
        """Return `weights` [N] of the rows by token, [T,k]."""
        return self._by_token(weights)

    def _by_token(self, rows: Tensor) -> Tensor:
        """Return the rows [N,...] in the order of the tokens, [T,k,...]."""
        return rows[self._inverse].view(-1, self._top_k, *rows.shape[1:])


class Experts(nn.Module):
    """Sends each token through the k of E SwiGLU experts with the largest router probability, and adds their outputs,
    weighted by these probabilities divided by their sum (Jiang et al. 2024, section 2.1), or by the probabilities
    themselves if `norm_top_k` is false.

    With `balance.by=bias`, experts are chosen by probability plus bias, but weighted by probability only (Wang et al.
    2024, auxiliary-loss-free load balancing). The bias is stored as an integer, in units of `bias_rate`, so that it is
    exact in every dtype and equal on all ranks.
    """

    op: Op = SWIGLU
    products: Products = PRODUCTS  # of rows that the route has made: communication is around any of them
    bias: Tensor | None
    tile: int = 0  # tokens per tile (tiles.py), to save memory; 0 computes all tokens at once
    # (chosen experts [T,k], number of experts, `known` of the last route or None) -> the route of a micro-batch; tensor
    # and expert parallelism replace it
    route: Callable[[Tensor, int, Any], Route] = LocalRoute

    def __init__(self, shape: Model, balance: Balance | None = None, tp: int = 1, ep: int = 1) -> None:
        """A device has 1 / tp of the width of every expert, or 1 / ep of the experts."""
        super().__init__()
        self.top_k, self.tp, width, stored = shape.top_k, tp, shape.ffn // tp, shape.experts // ep
        self.norm_top_k = shape.norm_top_k
        self.router = Router(shape.hidden, shape.experts)
        self.gate = nn.Parameter(torch.zeros(stored, width, shape.hidden))
        self.up = nn.Parameter(torch.zeros(stored, width, shape.hidden))
        self.down = nn.Parameter(torch.zeros(stored, shape.hidden, width))
        by_bias = balance is not None and balance.by == "bias"
        self.rate = balance.bias_rate if balance is not None else 0.0
        self.register_buffer("bias", torch.zeros(shape.experts, dtype=torch.int64) if by_bias else None)

    def forward(self, x: Tensor) -> tuple[Tensor, Routed]:
        """Compute the layer's output [T,C] of x [T,C], and return it with the router's decisions."""
        tile = -(-self.tile // self.tp)  # of the own tokens: those of all devices are together in a tile
        out, *routed = in_tiles(self._experts, x, tile, self.parameters()) if tile else self._experts(x)
        return out, Routed(*routed)

    def _experts(self, x: Tensor) -> tuple[Tensor, ...]:
        """Compute the output [T,C], the router's logits [T,E] and the chosen experts [T,k], all tokens at once."""
        logits = self.router(x)
        probabilities = logits.softmax(-1)
        known = None if self.tile else stored_decisions()  # in tiles, the second pass does not come here
        if known:  # the layer is computed again, and takes the decisions of its first pass
            path, chosen = known[0], known[1].long()
        else:
            scores = probabilities.detach()
            if self.bias is not None:
                scores = scores + self.rate * self.bias.to(scores.dtype)
            chosen = scores.topk(self.top_k, dim=-1).indices
            path = _Path(self.route, logits.shape[1], self.products)
            if known is not None:
                known += [path, chosen.int()]
        weights = probabilities.gather(-1, chosen)
        if self.norm_top_k:
            weights = weights / weights.sum(-1, keepdim=True)
        hidden = self.op(*_Enter.apply(x, chosen, self.gate, self.up, path))
        return _Leave.apply(hidden, weights, chosen, self.down, path, x.dtype), logits, chosen


class _Path:
    """The route of the two operations below, and their products. The route is built in each pass and freed after it: it
    has indices of all rows. All passes of a micro-batch have one path, so that ranks exchange counts only once."""

    def __init__(self, route: Callable[[Tensor, int, Any], Route], experts: int, products: Products) -> None:
        self._make, self._experts = route, experts
        self._known: Any = None
        self.grouped, self.outer = products
        self._route: Route | None = None

    def of(self, chosen: Tensor) -> Route:
        if self._route is None:
            self._route = self._make(chosen, self._experts, self._known)
            self._known = self._route.known
        return self._route

    def free(self) -> None:
        self._route = None


class _Enter(torch.autograd.Function):
    """Multiplies the rows of tokens x [T,C] with `gate` and `up`: [N,F] each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chosen: Tensor, gate: Tensor, up: Tensor, path: _Path) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, chosen, gate, up)
        ctx.path, route = path, path.of(chosen)
        rows = route.spread(x)
        of_gate, of_up = (path.grouped(rows, weight.transpose(1, 2), route.counts) for weight in (gate, up))
        return of_gate, of_up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dgate: Tensor, dup: Tensor) -> tuple[Tensor | None, ...]:
        x, chosen, gate, up = ctx.saved_tensors
        path, route = ctx.path, ctx.path.of(chosen)
        rows = route.spread(x)
        weights = [path.outer(one, rows, route.counts) for one in (dgate, dup)]
        del rows
        drows = path.grouped(dgate, gate, route.counts).add_(path.grouped(dup, up, route.counts))
        path.free()
        return route.collect(drows, x.dtype), None, *weights, None


class _Leave(torch.autograd.Function):
    """Multiplies hidden [N,F] with `down`, weights the rows, and adds those of each token: [T,C] in `dtype`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weights: Tensor, chosen: Tensor, down: Tensor, path: _Path, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(hidden, weights, chosen, down)
        ctx.path, route = path, path.of(chosen)
        rows = path.grouped(hidden, down.transpose(1, 2), route.counts) * route.spread_weights(weights)[:, None]
        path.free()
        return route.collect(rows, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weights, chosen, down = ctx.saved_tensors
        path, route = ctx.path, ctx.path.of(chosen)
        drows, of_row = route.spread(dout), route.spread_weights(weights)[:, None]
        dhidden = path.grouped(drows, down, route.counts)
        dweights = route.collect_weights((dhidden * hidden).sum(-1, dtype=weights.dtype))
        ddown = path.outer(drows.mul_(of_row), hidden, route.counts)
        return dhidden.mul_(of_row), dweights, None, ddown, None, None


def count_each(numbers: Tensor, limit: int) -> Tensor:
    """Count how often each of 0 .. limit - 1 occurs in int64 `numbers`: int64 [limit].

    Unlike `torch.bincount`, it does not make the host wait for the GPU.
    """
    return numbers.new_zeros(limit).scatter_add_(0, numbers, torch.ones_like(numbers))


def expert_weights(model: nn.Module) -> set[nn.Parameter]:
    """Return the stacked weights of all `Experts` modules, not those of their routers."""
    return {
        weight
        for module in model.modules()
        if isinstance(module, Experts)
        for weight in (module.gate, module.up, module.down)
    }
