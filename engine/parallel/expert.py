"""Expert parallelism: each of several HDP ranks stores a share of the experts of every layer.

Every rank of an ep group runs its own micro-batch. In each layer the rows of its tokens go to the ranks that store
their experts, and the results return:

```
 forward    tokens -> router -> rows, sorted by expert -> all-to-all -> own experts -> all-to-all -> sums by token
 backward   the same in reverse; rows are exchanged again
```
The host waits for the numbers of rows that ranks exchange, once for each layer and micro-batch, in the forward pass.
Before it waits, it launches the copy of the numbers, and then the sort of the rows, which does not need them. So the
GPU has work until the host launches the exchange. Recompute and the backward pass use the same numbers.

So all ranks of a group must run the same layers at the same time. This holds in lockstep mode, where each slot has a
micro-batch of every rank, if only an idle one. In free mode ranks have different numbers of micro-batches, and a group
would hang.

A rank computes the gradients of its experts for the tokens of the whole group. They need to be summed only over the
ranks that store the same experts.

Letters: T tokens of this rank, C hidden size, E experts, k experts per token, N rows of this rank's experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.models.experts.layer import Experts, LocalRoute


class ExpertParallel:
    """The exchange of rows in an ep group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.group = group

    def apply(self, model: nn.Module) -> None:
        """Set the routes of a model's experts. The model must have been created with a `Part` of this ep degree.

        Raises ValueError for experts that run in tiles: ranks would have different numbers of them.
        """
        for module in model.modules():
            if isinstance(module, Experts):
                if module.tile:
                    raise ValueError("expert parallelism cannot run in tiles: set mlp_tile=0")
                module.route = partial(ExpertRoute, self)

    def exchange(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Send the first send[0] of `rows` to the first rank of the group, and so on.

        Returns the rows from all ranks in their order, receive[i] of rank i. Collective: all ranks must call it.
        """
        out = rows.new_empty((sum(receive), *rows.shape[1:]))
        dist.all_to_all_single(out, rows.contiguous(), receive, send, group=self.group)
        return out


def fetch(numbers: Tensor) -> Callable[[], Any]:
    """Start to copy numbers to the host. The returned function waits for them, not for what was launched later."""
    if numbers.device.type != "cuda":
        return numbers.tolist
    copy = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
    copied = torch.cuda.current_stream(numbers.device).record_event()

    def wait() -> Any:
        copied.synchronize()
        return copy.tolist()

    return wait


class _Numbers:
    """How many rows the ranks of an ep group exchange."""

    def __init__(self, parallel: ExpertParallel, sent: Tensor) -> None:
        """Exchange the numbers of rows for each expert, `sent` [E], which the host will need soon. Collective."""
        self.received = torch.empty_like(sent)
        dist.all_to_all_single(self.received, sent, group=parallel.group)
        self._wait = fetch(torch.stack((sent, self.received)).view(2, parallel.size, -1).sum(-1))

    @cached_property
    def rows(self) -> tuple[list[int], list[int]]:
        """The rows to each rank, and those from each rank. The host waits for them."""
        sent, received = self._wait()
        del self._wait
        return sent, received


class ExpertRoute:
    """The route of tokens to the experts of an ep group. Collective: all ranks must call the same methods in order."""

    def __init__(self, parallel: ExpertParallel, chosen: Tensor, experts: int, known: _Numbers | None) -> None:
        """`chosen`, int64 [T,k], are the experts of each token, of `experts` in all.

        `known` are the numbers of rows that the first pass of the layer has exchanged; None in that pass.
        """
        self._parallel, self._local = parallel, LocalRoute(chosen, experts)
        self.known = known or _Numbers(parallel, self._local.counts)
        self._received = self.known.received.view(parallel.size, -1)  # [ranks, experts of a rank]

    @cached_property
    def counts(self) -> Tensor:
        """The rows of each expert of this rank, int64 [E / ranks of the group]."""
        return self._received.sum(0)

    @cached_property
    def _order(self) -> Tensor:
        """The order of the rows from all ranks by expert. With their number, PyTorch does not wait for it."""
        expert = torch.arange(self._received.shape[1], device=self._received.device).repeat(self._parallel.size)
        rows = sum(self.known.rows[1])
        return expert.repeat_interleave(self._received.flatten(), output_size=rows).argsort(stable=True)

    @cached_property
    def _inverse(self) -> Tensor:
        return self._order.argsort()

    def spread(self, x: Tensor) -> Tensor:
        """Return the rows [N,C] of this rank's experts, sorted by expert, of the tokens x [T,C] of all ranks."""
        return self._there(self._local.spread(x))

    def collect(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows [N,C] to the ranks of their tokens, and add those of each token: [T,C] in `dtype`."""
        return self._local.collect(self._back(rows.to(dtype)), dtype)

    def spread_weights(self, weights: Tensor) -> Tensor:
        """Return the weight of each row, [N], of all ranks' `weights` [T,k]."""
        return self._there(self._local.spread_weights(weights))

    def collect_weights(self, weights: Tensor) -> Tensor:
        """Return `weights` [N] of the rows to the ranks of their tokens, [T,k]."""
        return self._local.collect_weights(self._back(weights))

    def _there(self, rows: Tensor) -> Tensor:
        return self._parallel.exchange(rows, *self.known.rows)[self._order]

    def _back(self, rows: Tensor) -> Tensor:
        sent, received = self.known.rows
        return self._parallel.exchange(rows[self._inverse], received, sent)
