"""Tells DeepSpeed about tensor and pipeline parallelism.

DeepSpeed learns the groups from an object with Megatron's methods, an `mpu`. Its data parallel group is the hdp group,
and its model parallel group is all ranks of one HDP rank. The norm counts each copy of a parameter once and each slice
on its own device; a parameter that is taken for the other kind makes the norm wrong without an error.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from engine.family.families import parameters_of
from engine.models.decoder import Decoder
from engine.parallel.axes import Axes


class ModelParallelUnit:
    """The methods of an `mpu` that DeepSpeed 0.19 calls, outside its own optimizers of stages 1 and 2."""

    def __init__(self, axes: Axes) -> None:
        self._axes = axes

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """The group over which states are sharded and gradients are averaged."""
        return self._axes.hdp

    def get_data_parallel_world_size(self) -> int:
        """The size of the data parallel group."""
        return self._axes.mesh.hdp

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """The group over which stage 3 sums norms."""
        return self._axes.model

    def get_model_parallel_world_size(self) -> int:
        """The size of the model parallel group."""
        return self._axes.mesh.tp * self._axes.mesh.pp

    def get_model_parallel_rank(self) -> int:
        """This rank's place in the model parallel group. It is part of the names of checkpoint files."""
        return self._axes.place.pp * self._axes.mesh.tp + self._axes.place.tp

    def get_tensor_model_parallel_world_size(self) -> int:
        """The size of the tp group, for the checkpoint files."""
        return self._axes.mesh.tp

    def get_pipeline_model_parallel_world_size(self) -> int:
        """The number of stages, for the checkpoint files."""
        return self._axes.mesh.pp


def mark(model: Decoder, axes: Axes) -> None:
    """Mark the slices of matrices on this device: the norm of stage 3 counts other parameters on one device only."""
    table = parameters_of(model.shape)
    for name, parameter in model.named_parameters():
        if axes.mesh.tp > 1 and table[name].split is not None:
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


def copies(model: Decoder, axes: Axes, tied: bool) -> set[nn.Parameter]:
    """Return the parameters that another device counts in the norm. Embedding and head may be `tied`."""
    table, found = parameters_of(model.shape), set[nn.Parameter]()
    for name, parameter in model.named_parameters():
        is_whole = table[name].split is None and axes.place.tp > 0
        if is_whole or (tied and name == "head.weight" and not axes.first):
            found.add(parameter)
    return found


def sum_copies(model: nn.Module, axes: Axes) -> None:
    """Sum the gradients of a tied weight's two copies, from the embedding and from the head, over their stages.

    ZeRO treats each as complete, and then reduces it over the hdp group. The ranks of the two stages must call it,
    after their last backward pass.
    """
    if axes.tied is not None:
        named = dict(model.named_parameters())
        name = "embedding.weight" if axes.first else "head.weight"
        dist.all_reduce(named[name].main_grad, group=axes.tied)  # type: ignore[attr-defined]
