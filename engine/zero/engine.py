"""DeepSpeed under HDP: the one place that knows it.

Model states are sharded over all ranks, whatever rings exist. The loss of a step is the sum over the loss tokens of all
ranks divided by their number T; DeepSpeed averages gradients over the world, so the loss is multiplied by the world
size first (ByteScale, token-level loss).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from engine.attention.meeting import Meeting
from engine.config.schema import Config
from engine.cost.states import is_bf16_optimizer
from engine.zero.settings import deepspeed_settings
from engine.zero.shards import join

_TAG = "zero"


class ZeroEngine:
    """A model whose optimizer states are sharded over the world.

    `torch.distributed` must be initialised; its default group is ZeRO's. A step is any number (at least one) of
    `forward` and `backward`, then one `step` on all ranks.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, config: Config) -> None:
        join()
        self._world = torch.distributed.get_world_size()
        self._passes = is_bf16_optimizer(config)
        self._engine: Any = deepspeed.initialize(
            model=model, optimizer=optimizer, config=deepspeed_settings(config), dist_init_required=False
        )[0]

    @property
    def module(self) -> nn.Module:
        """Return the model in the dtype in which it computes."""
        return self._engine.module  # type: ignore[no-any-return]

    def forward(self, tokens: Tensor, positions: Tensor, meeting: Meeting, labels: Tensor) -> Tensor:
        """Return the summed loss of one micro-batch; tokens, positions and labels are [T]."""
        return self._engine(tokens, positions, meeting, labels)  # type: ignore[no-any-return]

    def backward(self, loss_sum: Tensor, step_loss_tokens: int) -> None:
        """Accumulate the gradient of a micro-batch's summed loss, as its share of the whole step's mean."""
        self._engine.backward(loss_sum * (self._world / step_loss_tokens), scale_wrt_gas=False)
        if self._passes:  # added to the fp32 ones; DeepSpeed would keep them beside the next micro-batch's activations
            self._engine.optimizer.clear_lp_grads(set_to_none=True)

    def step(self, lr: float) -> float:
        """Reduce, clip and update on all ranks; return the gradient's norm over all ranks, before clipping.

        It is inf for gradients that are not finite: then DeepSpeed has updated nothing.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        self._engine.step()
        return float(self._engine.get_global_grad_norm())

    def save(self, folder: Path) -> None:
        """Write this rank's share of the states into `folder`; all ranks call it."""
        self._engine.save_checkpoint(str(folder), tag=_TAG, save_latest=False)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote with the same number of ranks; all ranks call it."""
        self._engine.load_checkpoint(str(folder), tag=_TAG)
