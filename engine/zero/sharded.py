"""The update of ZeRO stages 1 and 2: each rank reduces, clips and updates its shard of the gradients and weights only.

| in a step | what happens, bucket by bucket (buckets.py) |
|---|---|
| backward passes | products add gradients of weights to those of their bucket; a hook adds all others, and frees them |
| reduction | reduce-scatter into the rank's shard; the squares of a shard are summed while the next bucket travels |
| norm | one sum over all ranks, which the host reads once |
| scale | the factor of the average over ranks and that of clipping, in one multiplication where this is exact |
| update | the optimizer updates a shard while the weights of the bucket before are gathered |

The bytes that a device reads and writes from the norm on, for each element of its shard, with w bytes of a gradient, b
of a weight, and m moments. Collectives move more.

| what | bytes | w 4, b 2, m 2 |
|---|---|---|
| norm | w read | 4 |
| scale, unless the factor is 1 | w read and written; twice where the two factors are not exact in one | 8 |
| fused optimizer | w (2 + m) read: master weight, gradient, moments; w (1 + m) written | 28 |
| weights | w read, b written | 6 |
| sum | w (2 m + 7) + b | 46 |

Buckets are reduced in the same order on all ranks. Stage 1 begins after the last backward pass of the step, or inside
it after `reduce_from_here` (Note: [reductions and rings] in docs/design.md). Stage 2 reduces inside each backward pass.

DeepSpeed's engine calls this class in place of its own optimizers, and writes `state_dict` into its checkpoint files.
"""

from __future__ import annotations

import math
from collections.abc import Set
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from torch import Tensor, nn

from engine.control import progress
from engine.models.common import product
from engine.offload.pinned import allocate
from engine.zero.buckets import Bucket, divide

_SQUARED = 1 << 16  # elements whose squares are summed at once on a CPU
_EPSILON = 1e-6  # is added to a norm by which gradients are divided, as in DeepSpeed


class ShardedOptimizer(ZeROOptimizer):
    """PyTorch's optimizer on the shards of this rank."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        order: list[nn.Parameter],
        most: int,
        hdp: dist.ProcessGroup | None,
        experts: dist.ProcessGroup | None,
        clip_norm: float,
        each_pass: bool,
        on_host: bool,
        copies: Set[nn.Parameter],
    ) -> None:
        """Move the model's weights into buckets of at most `most` elements, and give `optimizer` their shards.

        All ranks must call it. Their weights are then equal: those of each shard are from the rank that stores it.

        Args:
            optimizer: has the model's parameters in groups, whose key `experts` says whether they are those of experts.
            order: the order in which a backward pass computes the gradients of the parameters.
            hdp: the ranks that store the same part of the model; None for all ranks.
            experts: the ranks that store the same experts; None without expert parallelism.
            clip_norm: gradients of a larger norm are scaled to it; 0 for no clipping.
            each_pass: whether gradients are reduced in each backward pass (stage 2).
            on_host: whether master weights and the optimizer's states are in host memory.
            copies: the parameters that another device counts in the norm.
        """
        super().__init__()
        self.optimizer, self.dp_process_group, self.clip_grad = optimizer, hdp, clip_norm
        self.overflow, self._global_grad_norm = False, 0.0
        self.custom_loss_scaler, self.external_loss_scale, self.torch_autocast_gradscaler = False, None, None
        self._each_pass, self.on_host, self._ranks = each_pass, on_host, dist.get_world_size(hdp)
        self._most = most
        self.device = order[0].device
        # PyTorch's optimizer gets a group for each bucket, whose only parameter are the master weights of the shard.
        groups, self.buckets = optimizer.param_groups[:], list[Bucket]()
        optimizer.param_groups.clear()
        for number, parameters in divide(groups, order, most):
            of_bucket = experts if groups[number]["experts"] and experts is not None else hdp
            rank, ranks = dist.get_rank(of_bucket), dist.get_world_size(of_bucket)
            bucket = Bucket(parameters, of_bucket, rank, ranks, on_host)
            self.buckets.append(bucket)
            optimizer.param_groups.append({**groups[number], "params": [bucket.master]})
            for at, parameter in enumerate(parameters):
                parameter.register_post_accumulate_grad_hook(partial(self._add, bucket, at))
                if product.adds(self.device):
                    parameter.add_product = partial(bucket.add_product, at)  # type: ignore[attr-defined]
                if not each_pass:
                    parameter.main_grad = bucket.view(at)  # type: ignore[attr-defined]
        self._counted = [
            list(bucket.places([one not in copies for one in bucket.parameters])) for bucket in self.buckets
        ]
        self._reducing, self._started = each_pass, 0
        self._host = self._host_buffers() if on_host else [None] * len(self.buckets)
        self.update_lp_params()

    def _host_buffers(self) -> list[tuple[Tensor, Tensor]]:
        """Pinned host memory for the gradients and the updated weights of each shard."""
        found, lengths = list[list[Tensor]](), [bucket.length for bucket in self.buckets]
        for dtype in (self.buckets[0].dtype, self.buckets[0].weights.dtype):
            flat = allocate(sum(lengths) * dtype.itemsize, self.device).view(dtype)
            found.append([*flat.split(lengths)])
        return [*zip(*found, strict=True)]

    # What DeepSpeed's engine and the loader of checkpoints read.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of PyTorch's optimizer, one a bucket."""
        return self.optimizer.param_groups

    @property
    def single_partition_of_fp32_groups(self) -> list[Tensor]:
        """The master weights of this rank by bucket."""
        return [bucket.master for bucket in self.buckets]

    @property
    def round_robin_bit16_groups(self) -> list[list[nn.Parameter]]:
        """The parameters by bucket."""
        return [bucket.parameters for bucket in self.buckets]

    def state_dict(self) -> dict[str, Any]:
        """The states of this rank, with DeepSpeed's keys."""
        masters = [master.detach() for master in self.single_partition_of_fp32_groups]
        return {"base_optimizer_state": self.optimizer.state_dict(), "single_partition_of_fp32_groups": masters}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: hooks free each gradient, and the first of a step is written over those of the step before."""

    # The reduction.

    def _add(self, bucket: Bucket, number: int, parameter: nn.Parameter) -> None:
        """A hook: add the gradient of a parameter, and reduce the buckets that are complete, in their order.

        PyTorch calls it once in a backward pass, after the last use of the parameter, also if products have added all
        of its gradient and none is left (tests/zero/test_added.py fails without it: stage 1 would reduce the bucket
        after the pass, and stage 2 keep the gradients of all later ones until then). Products themselves cannot tell:
        a weight has several in a pass, of tiles, or of a tied embedding.
        """
        bucket.add(number)
        if self._reducing:
            assert bucket.pending, "a gradient after the reduction of its bucket"
            bucket.pending.discard(number)
            while self._started < len(self.buckets) and not self.buckets[self._started].pending:
                self._start()

    def reduce_from_here(self) -> None:
        """Reduce each bucket in the next backward pass, as soon as its parameters have their gradients.

        It must be this rank's last backward pass of the step.
        """
        self._reducing = True

    def _start(self) -> None:
        """Start the reduction of the next bucket. In stage 2, wait for the one before, which frees its gradients."""
        bucket, number = self.buckets[self._started], self._started
        if self._each_pass and number:
            self.buckets[number - 1].collect()
        self._started += 1
        bucket.reduce()
        if self._each_pass and len(bucket.weights) > self._most:
            bucket.collect()  # a single large parameter

    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Start the reductions that no hook has started."""
        while self._started < len(self.buckets):
            self._start()
        self._reducing, self._started = self._each_pass, 0

    def overlapping_partition_gradients_reduce_epilogue(self) -> None:
        """The end of a backward pass in stage 2: add the sums of its gradients to those of this step."""
        self.reduce_gradients()
        self.buckets[-1].collect()

    def finalize_gradient_accumulation_boundary(self) -> None:
        """The end of a step in stage 2: its gradients have been reduced."""

    # The update.

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        """Clip the gradients by their norm over all ranks, and update. All ranks must call it, after the reductions.

        Gradients that are not finite make the norm infinite, and then no rank updates anything.
        """
        # The norm: squares of a shard are summed while the reductions of the next buckets travel.
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        shards = list[Tensor]()
        for bucket, places in zip(self.buckets, self._counted, strict=True):
            shards.append(bucket.reduced())
            if places:
                squares += squared_norm([shards[-1][place] for place in places])
        dist.all_reduce(squares)
        # Of the average over ranks, like the gradients that are clipped by it.
        norm = math.sqrt(total) / self._ranks if math.isfinite(total := squares.item()) else math.inf
        self.overflow, self._global_grad_norm = norm == math.inf, norm
        if self.overflow:
            return
        progress.report("update")
        self._update(shards, norm)

    def _update(self, shards: list[Tensor], norm: float) -> None:
        """Update each shard, and gather the weights of its bucket while the next one is updated."""
        # Average and clip all shards, and start their copies to the host. DeepSpeed multiplies by one factor after the
        # other. Where the ranks are a power of two the first rounds nothing, and their product gives the same bits.
        average = 1.0 / self._ranks
        clip = min(1.0, self.clip_grad / (norm + _EPSILON)) if self.clip_grad else 1.0
        factors = [average, clip] if self._ranks & (self._ranks - 1) else [average * clip]
        for shard, host in zip(shards, self._host, strict=True):
            for factor in factors:
                if factor != 1.0:
                    shard.mul_(factor)
            if host is not None:
                host[0].copy_(shard, non_blocking=True)
        if self.on_host and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        # `step` of PyTorch's optimizers updates all groups that they have. With one at a time, the weights of a bucket
        # are gathered while the next one is updated.
        groups, gathers = self.optimizer.param_groups, []
        try:
            for bucket, group, shard, host in zip(self.buckets, groups, shards, self._host, strict=True):
                self.optimizer.param_groups = [group]
                bucket.master.grad = shard if host is None else host[0]
                self.optimizer.step()
                bucket.master.grad = None
                own = bucket.own(bucket.weights)
                if host is None:
                    own.copy_(bucket.master)
                else:
                    own.copy_(host[1].copy_(bucket.master), non_blocking=True)
                gathers.append(bucket.gather())
        finally:
            self.optimizer.param_groups = groups
        _wait(gathers)

    @torch.no_grad()
    def update_lp_params(self) -> None:
        """Round the master weights to the weights of the model, on all ranks."""
        gathers = []
        for bucket in self.buckets:
            bucket.own(bucket.weights).copy_(bucket.master)
            gathers.append(bucket.gather())
        _wait(gathers)


def squared_norm(pieces: list[Tensor]) -> Tensor:
    """The sum of the squares of some tensors of one device, summed in float64; a scalar on that device.

    On GPUs it allocates 8 bytes for 65,536 elements, and launches a kernel for 21 million and five more.
    """
    if pieces[0].device.type == "cpu":
        # Here PyTorch copies each tensor to float64. Its kernel for GPUs converts each element that it has read.
        pieces = [part for piece in pieces for part in piece.split(_SQUARED)]
    return torch.stack(torch._foreach_norm(pieces, dtype=torch.float64)).square().sum()


def _wait(works: list[Any]) -> None:
    for work in works:
        if work is not None:
            work.wait()
