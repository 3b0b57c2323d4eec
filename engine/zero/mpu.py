"""Tells DeepSpeed about tensor and pipeline parallelism.

DeepSpeed learns the groups from an object with Megatron's methods, an `mpu`. Its model parallel group is all ranks of
one HDP rank, over which it sums the squared norms; its data parallel group is the hdp group. Which parameters are
copies, it learns from marks on them: without a mark a copy is counted several times, or a slice only once, and the
norm is wrong without an error.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from engine.family.families import parameters_of
from engine.models.decoder import Decoder
from engine.parallel.axes import Axes


class ModelParallelUnit:
    """The methods that DeepSpeed 0.19 calls on an `mpu`."""

    def __init__(self, axes: Axes) -> None:
        self._axes = axes

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """The group over which states are sharded and gradients are averaged."""
        return self._axes.hdp

    def get_data_parallel_group_ranks(self) -> list[int]:
        """The global ranks of the data parallel group."""
        return dist.get_process_group_ranks(self._axes.hdp)

    def get_data_parallel_world_size(self) -> int:
        """The size of the data parallel group."""
        return self._axes.mesh.hdp

    def get_data_parallel_rank(self) -> int:
        """This rank's place in the data parallel group."""
        return self._axes.place.hdp

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """The group over which norms are summed."""
        return self._axes.model

    def get_model_parallel_world_size(self) -> int:
        """The size of the model parallel group."""
        return self._axes.mesh.tp * self._axes.mesh.pp

    def get_model_parallel_rank(self) -> int:
        """This rank's place in the model parallel group. It is part of the names of checkpoint files."""
        return self._axes.place.pp * self._axes.mesh.tp + self._axes.place.tp

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        """The tp group."""
        return self._axes.tp

    def get_tensor_model_parallel_world_size(self) -> int:
        """The size of the tp group."""
        return self._axes.mesh.tp

    def get_tensor_model_parallel_rank(self) -> int:
        """This rank's place in the tp group."""
        return self._axes.place.tp

    def get_pipeline_model_parallel_world_size(self) -> int:
        """The number of stages."""
        return self._axes.mesh.pp

    def get_pipeline_model_parallel_rank(self) -> int:
        """This rank's stage."""
        return self._axes.place.pp


def mark(model: Decoder, axes: Axes, tied: bool) -> None:
    """Set DeepSpeed's marks on the parameters of a device's part of a model, whose embedding and head may be tied."""
    table = parameters_of(model.shape)
    for name, parameter in model.named_parameters():
        if axes.mesh.tp > 1 and table[name].split is not None:
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        if tied and name == "head.weight" and not axes.first:
            parameter.ds_pipe_replicated = True  # type: ignore[attr-defined]


def is_counted(parameter: nn.Parameter, axes: Axes) -> bool:
    """Whether this device counts a marked parameter in the norm: one device does for each copy and each slice."""
    split = getattr(parameter, "tensor_model_parallel", False)
    return not getattr(parameter, "ds_pipe_replicated", False) and (split or axes.place.tp == 0)


def sum_copies(model: nn.Module, axes: Axes) -> None:
    """Sum the gradients of a tied weight's two copies, from the embedding and from the head, over their stages.

    ZeRO treats each as complete, and then reduces it over the hdp group. The ranks of the two stages must call it,
    after their last backward pass.
    """
    if axes.tied is not None:
        named = dict(model.named_parameters())
        name = "embedding.weight" if axes.first else "head.weight"
        dist.all_reduce(named[name].main_grad, group=axes.tied)  # type: ignore[attr-defined]
