"""Buckets: parameters of one kind in one flat tensor, of which each rank stores the states of one part, its shard.

| tensor | elements | dtype |
|---|---|---|
| weights; the parameters are views of it | all, padded to a multiple of the ranks | of the run |
| gradients | all | fp32 or the dtype of the run, whichever is wider |
| master weights and the optimizer's states | of the shard | of the gradients |

A bucket is a group of parameters in DeepSpeed's checkpoint files (partition.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.dtypes import wider
from engine.models.common.product import add_product
from engine.zero.transfers import gather, reduce_scatter, shard_of

_ALIGN = 8  # elements; each shard begins at a multiple, so that kernels read whole vectors
Parameters = list[nn.Parameter]


class Bucket:
    """The flat tensors of parameters that are reduced, updated and gathered together."""

    def __init__(
        self, parameters: Parameters, group: dist.ProcessGroup | None, rank: int, ranks: int, on_host: bool
    ) -> None:
        """Move the weights of `parameters` into a flat tensor. `group` are the `ranks` ranks that store the same ones.

        With `on_host`, master weights are in host memory.
        """
        self.parameters, self.group, self.rank, self.ranks = parameters, group, rank, ranks
        self._size = sum(map(torch.numel, parameters))  # without the padding
        length = -(-self._size // (ranks * _ALIGN)) * _ALIGN
        first = parameters[0]
        self.weights = torch.zeros(ranks * length, dtype=first.dtype, device=first.device)
        self.starts, at = list[int](), 0
        for parameter in parameters:
            self.starts.append(at)
            place = self.weights[at : at + parameter.numel()].view(parameter.shape)
            place.copy_(parameter.data)
            parameter.data = place
            at += parameter.numel()
        self.dtype, self.length = wider(first.dtype), length
        own = shard_of(self.weights, rank, ranks)
        self.master = nn.Parameter(own.to("cpu" if on_host else own.device, self.dtype, copy=True))
        self.gradients: Tensor | None = None
        self.sums: Tensor | None = None  # of the reductions of a step, if it has several (stage 2)
        self.work: Any = None  # the reduction that has been started
        self._summed = False
        self._clear()

    def _clear(self) -> None:
        numbers = range(len(self.parameters))
        self.missing = set(numbers)  # parameters without a gradient so far
        self.pending = set(numbers)  # parameters whose gradient the reduction waits for

    def view(self, number: int) -> Tensor:
        """The gradient of a parameter, a view of `gradients`, which are allocated if there are none."""
        if self.gradients is None:
            # A first gradient is written, not added, and `complete` zeroes parameters without one.
            self.gradients = torch.empty_like(self.weights, dtype=self.dtype)
            self.gradients[self._size :].zero_()
        parameter, start = self.parameters[number], self.starts[number]
        return self.gradients[start : start + parameter.numel()].view(parameter.shape)

    def add_product(self, number: int, left: Tensor, right: Tensor) -> None:
        """Add left [O,T] @ right [T,I] to the gradient of a parameter [O,I]."""
        add_product(self.view(number), left, right, fresh=number in self.missing)
        self.missing.discard(number)

    def add(self, number: int) -> None:
        """Add the gradient that autograd has computed for a parameter, and free it. None if products have added it."""
        parameter = self.parameters[number]
        if parameter.grad is None:
            return
        if number in self.missing:  # written instead of added, so that nothing zeroes the gradients
            self.missing.discard(number)
            self.view(number).copy_(parameter.grad)
        else:
            self.view(number).add_(parameter.grad)
        parameter.grad = None

    def complete(self) -> Tensor:
        """Return the gradients, where parameters without one have zeros."""
        for number in self.missing:
            self.view(number).zero_()
        self._clear()
        self.pending = set()
        assert self.gradients is not None
        return self.gradients

    def reduce(self) -> None:
        """Start to sum the gradients over the group, each rank its shard. `collect` or `reduced` waits for it."""
        self.work = reduce_scatter(self.complete(), self.rank, self.ranks, self.group)

    def gather(self) -> Any:
        """Start to gather the weights from their shards. Returns the work to wait for; None if it is done."""
        return gather(self.weights, self.rank, self.ranks, self.group)

    def collect(self) -> None:
        """Wait for a reduction, add its result to the sums of this step, and free the gradients. Once a reduction."""
        self._wait()
        if self.gradients is None:
            return
        own = self.own(self.gradients)
        if self.sums is None:
            self.sums = torch.empty_like(own)
        self.sums = self.sums.add_(own) if self._summed else self.sums.copy_(own)
        self._summed, self.gradients = True, None
        self._clear()

    def reduced(self) -> Tensor:
        """The reduced gradients of a step, of this rank's shard. The next gradient begins another step."""
        self._wait()
        self._clear()
        self._summed = False
        if self.sums is not None:
            return self.sums
        assert self.gradients is not None
        return self.own(self.gradients)

    def _wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        self.work = None

    def own(self, flat: Tensor) -> Tensor:
        """The part of a flat tensor of the bucket that this rank stores."""
        return shard_of(flat, self.rank, self.ranks)

    def places(self, chosen: Sequence[bool]) -> Iterator[slice]:
        """Yield where the shard has elements of the chosen parameters; neighbours are joined."""
        begin = self.rank * self.length
        open_at = end = 0
        for parameter, start, one in zip(self.parameters, self.starts, chosen, strict=True):
            low, high = max(0, start - begin), min(self.length, start + parameter.numel() - begin)
            if not one or low >= high:
                continue
            if low != end or open_at == end:
                if open_at < end:
                    yield slice(open_at, end)
                open_at = low
            end = high
        if open_at < end:
            yield slice(open_at, end)


def divide(groups: Sequence[dict[str, Any]], order: Sequence[nn.Parameter], most: int) -> list[tuple[int, Parameters]]:
    """Divide the parameters of an optimizer's groups into buckets; returns the number of the group with each.

    `order` is that in which parameters get their gradient, and buckets have that of their last parameter. A bucket has
    at most `most` elements unless one parameter has more.
    """
    when, found = {parameter: at for at, parameter in enumerate(order)}, list[tuple[int, Parameters]]()
    for number, group in enumerate(groups):
        bucket, size = Parameters(), 0
        for parameter in sorted(group["params"], key=when.__getitem__):
            if bucket and size + parameter.numel() > most:
                found.append((number, bucket))
                bucket, size = [], 0
            bucket.append(parameter)
            size += parameter.numel()
        found.append((number, bucket))
    return sorted(found, key=lambda one: when[one[1][-1]])
