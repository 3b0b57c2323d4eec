"""DeepSpeed's ZeRO under HDP. Only `engine/zero` imports DeepSpeed.

Model states are sharded over all HDP ranks, independently of the rings of a plan. The loss of a step is the sum over
the loss tokens of all ranks, divided by the number of these tokens (ByteScale, token-level loss). DeepSpeed averages
gradients over its data-parallel ranks, which are the HDP ranks, so the loss is first multiplied by the number of ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch import Tensor, nn

from engine.attention.context import AttentionContext
from engine.config.schema import Config
from engine.control import progress
from engine.models.decoder import Decoder
from engine.parallel.axes import Axes
from engine.zero.initialize import initialize
from engine.zero.mpu import sum_copies
from engine.zero.reshard import load_resharded
from engine.zero.shards import init_deepspeed
from engine.zero.snapshot import Snapshot
from engine.zero.states import Written

_TAG = "zero"


class ZeroEngine:
    """Trains a model with DeepSpeed's ZeRO.

    `torch.distributed` must be initialised; ZeRO uses its default group. In each training step, every rank calls
    `forward` and `backward` at least once, and then all ranks call `step`. In free mode ranks may call
    `forward` and `backward` different numbers of times.
    """

    def __init__(
        self, model: Decoder, optimizer: torch.optim.Optimizer, config: Config, axes: Axes | None = None
    ) -> None:
        """`axes` are the groups of this rank; None if every rank has the whole model."""
        init_deepspeed()
        self._axes = axes
        groups.mpu = groups.mesh_device = None  # DeepSpeed keeps those of the engine before
        self._config = config
        self._engine = initialize(model, optimizer, config, axes)
        if config.zero.stage == 3:
            optimizer.register_step_pre_hook(lambda *_: progress.report("update"))
        # DeepSpeed hands its checkpoints to this object, which copies them to host memory instead of writing them.
        self._snapshot = Snapshot(self._engine.device, config.cluster.ranks_per_node, dist.get_rank())
        self._engine.checkpoint_engine = self._snapshot
        self._engine._copy_recovery_script = lambda save_path: None  # `ckpt export` takes its place

    @property
    def module(self) -> nn.Module:
        """The model; its parameters have the dtype of the run."""
        return self._engine.module  # type: ignore[no-any-return]

    def forward(self, tokens: Tensor, positions: Tensor, labels: Tensor, attention: AttentionContext) -> Any:
        """Compute the summed loss of one micro-batch, a scalar. `tokens`, `positions` and `labels` are int64 [T].

        In a pipeline it returns the output of the stage's model.
        """
        return self._engine(tokens, positions, labels, attention)

    def backward(self, loss_sum: Tensor, step_loss_tokens: int) -> None:
        """Run the backward pass of a micro-batch and accumulate its gradients.

        `loss_sum` is the result of `forward`. It is divided by `step_loss_tokens`, the step's total over all ranks, so
        that gradients are those of the step's mean loss. A loss that is not finite makes all gradients so: an overflow
        of the loss alone would leave them finite, and the step would be applied.
        """
        scale = loss_sum.detach() * 0 + self._engine.dp_world_size / step_loss_tokens
        self._engine.backward(loss_sum * scale, scale_wrt_gas=False)

    def reduce_from_here(self) -> None:
        """Reduce gradients within the next backward pass, which must be this rank's last one of the step. In stage 1.

        Buckets are reduced in the same order on all ranks, each as soon as all of its gradients are complete. The plan
        says which ranks do so; others reduce in `step` (Note: [reductions and rings] in docs/design.md).
        """
        self._engine.optimizer.reduce_from_here()

    def step(self, lr: float) -> float:
        """Reduce and clip gradients, and update the parameters with learning rate `lr`. All ranks must call it.

        Returns the norm of the whole gradient before clipping, the same on all ranks. It is inf if a loss or a gradient
        of any rank is not finite; then no rank updates anything. The host waits for the device once, for the norm; with
        `optimizer.on_host` also for the copies of gradients.
        """
        if self._axes is not None and self._config.model.tied:
            sum_copies(self.module, self._axes)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        self._engine.step()
        return float(self._engine.get_global_grad_norm())

    def snapshot(self, copies: bool = True) -> Snapshot:
        """Copy this rank's part of the model and optimizer states to host memory. All ranks must call it.

        Without `copies`, or if the result's `short` is not 0, it must be written before the next step. The same object
        is returned each time: it must be written before the next call.
        """
        self._snapshot.copies = copies
        written = Written.of(self._config)
        self._engine.save_checkpoint(".", tag=_TAG, client_state=written.to_client_state(), save_latest=False)
        return self._snapshot

    def reserve_snapshot(self) -> None:
        """Begin to allocate the memory for `snapshot` in another thread. All ranks must call it, after the first step.

        Without it, the first snapshot allocates, which takes four times as long as the copy. Before the first step
        the optimizer has no states.
        """
        self.snapshot(copies=False).reserve()

    def load(self, folder: Path) -> None:
        """Load the states of the checkpoint `folder`, of any mesh and ZeRO stage.

        All ranks must call it, before the first step. Learning rates, weight decay and the like stay those of this
        engine's config. DeepSpeed's own loader is not used: it unpickles any class, so a checkpoint of another user
        could run code.
        """
        load_resharded(self._engine, folder, self._config, self._axes)
