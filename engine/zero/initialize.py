"""DeepSpeed's engine. In stages 1 and 2 it has our optimizer in place of DeepSpeed's (sharded.py)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import shutdown_init_context

import engine.zero.norm  # noqa: F401  (changes how stage 3 computes norms)
from engine.config.schema import Config
from engine.cost.sizes import bucket_elements
from engine.models.decoder import Decoder
from engine.parallel.axes import Axes
from engine.zero.mpu import ModelParallelUnit, copies, mark
from engine.zero.settings import deepspeed_settings
from engine.zero.sharded import ShardedOptimizer


class _Engine(DeepSpeedEngine):
    """In stages 1 and 2 overrides two methods that DeepSpeed's `__init__` calls."""

    def __init__(self, typed: Config, axes: Axes | None, **arguments: Any) -> None:
        self._typed, self._axes = typed, axes
        super().__init__(**arguments)

    def _broadcast_model(self) -> None:
        """Make the weights equal on all ranks. Our optimizer gathers them from their shards instead, experts too."""
        if self._typed.zero.stage == 3:
            super()._broadcast_model()

    def _configure_zero_optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        config, axes = self._typed, self._axes
        if config.zero.stage == 3:
            return super()._configure_zero_optimizer(optimizer)
        return ShardedOptimizer(
            optimizer,
            order=[*self.module.parameters()][::-1],
            most=bucket_elements(config, dist.get_world_size(self.seq_data_parallel_group)),
            hdp=self.seq_data_parallel_group,
            experts=axes.experts if axes else None,
            clip_norm=config.optimizer.clip_norm,
            each_pass=config.zero.stage == 2,
            on_host=config.optimizer.on_host,
            copies=copies(self.module, axes, config.model.tied) if axes else set(),
        )


def initialize(model: Decoder, optimizer: torch.optim.Optimizer, config: Config, axes: Axes | None) -> Any:
    """Create DeepSpeed's engine, as `deepspeed.initialize` does. `axes` are the groups of this rank."""
    shutdown_init_context()
    if config.zero.stage == 3 and axes is not None:
        mark(model, axes)
    mpu, settings = None if axes is None else ModelParallelUnit(axes), deepspeed_settings(config)
    return _Engine(
        config,
        axes,
        args=None,
        model=model,
        optimizer=optimizer,
        mpu=mpu,
        dist_init_required=False,
        config=settings,
        config_class=DeepSpeedConfig(settings, mpu),
    )
