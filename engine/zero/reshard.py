"""Loads a checkpoint's model states, with any mesh and ZeRO stage.

Each rank reads the ranges of the master weights and moments that it stores now, wherever the old ranks stored them. The
values are copied, so the result is exact.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.config.schema import Config
from engine.family.families import parameters_of
from engine.parallel.axes import Axes
from engine.zero.partition import places
from engine.zero.states import MASTER, Own, SavedStates, Written

# The names of a rank's flat master weights: in our optimizer of stages 1 and 2 (sharded.py), in DeepSpeed's of stage 3.
_MASTERS = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")


@torch.no_grad()
def load_resharded(engine: Any, checkpoint: Path, config: Config, axes: Axes | None = None) -> None:
    """Load a checkpoint into a DeepSpeed engine that has not run yet. All ranks must call it.

    `axes` are the groups of this rank; None if every rank has the whole model.

    Allocates only the moments, and temporary memory while the low-precision weights are gathered.
    """
    optimizer, group, stage = engine.optimizer, axes.hdp if axes else None, config.zero.stage
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    tp, tp_rank, pp_rank = (axes.mesh.tp, axes.place.tp, axes.place.pp) if axes else (1, 0, 0)
    if stage == 3:
        optimizer.checkpoint_event_prologue()
    # The flat tensors of this rank: DeepSpeed has already allocated the master weights. Moments exist only after the
    # first update, so they are created here.
    masters: list[Tensor] = next(getattr(optimizer, name) for name in _MASTERS if hasattr(optimizer, name))
    groups = [{name: shape.numel() for name, shape in shapes.items()} for shapes in engine._get_zero_param_shapes()]
    lengths = [len(flat) for flat in masters]
    own = Own(pp_rank * tp + tp_rank, rank, ranks, Written.of(config), stage, groups, lengths)
    saved = SavedStates(checkpoint, parameters_of(config.model), own)
    firsts = [next(iter(group)) for group in groups]  # parameters of a group have the same states
    states = [
        {key: flat.detach() if key == MASTER else torch.zeros_like(flat) for key in saved.keys(first)}
        for first, flat in zip(firsts, masters, strict=True)
    ]
    for flat in masters:
        flat.zero_()  # the padding
    # Each state is read straight into this rank's partition; no whole tensor is in memory.
    ep = axes.mesh.ep if axes else 1
    for name, place in places(groups, lengths, stage, ranks).items():
        # Every ep-th rank stores the same share of the experts.
        ep_rank, edp_rank = (rank % ep, rank // ep) if saved.table[name].stacked else (0, rank)
        start, stop, at = place.on_rank(edp_rank)
        if start < stop:
            for key, flat in states[place.group].items():
                saved.read(name, key, ep_rank * place.size + start, flat[at : at + stop - start], tp, tp_rank)

    # The optimizer gets the moments as the states of its flat parameters. Buffers are not partitioned.
    for first, flat, of_flat in zip(firsts, masters, states, strict=True):
        moments = {key: tensor for key, tensor in of_flat.items() if key != MASTER}
        optimizer.optimizer.state[flat] = moments | _step(saved.step(first), flat)
    for name, buffer in engine.module.named_buffers():
        if (found := saved.buffer(name)) is not None:
            buffer.copy_(found)

    # Copy the master weights to the weights in the run's dtype.
    if stage == 3:
        own = optimizer.state_dict()
        optimizer.load_state_dict([own] * ranks, load_optimizer_states=False)
        optimizer.checkpoint_event_epilogue()
    else:
        optimizer.update_lp_params()


def _step(step: int | None, flat: Tensor) -> dict[str, Any]:
    """The optimizer's count of updates as it stores it; SGD, for example, has none."""
    if step is None:
        return {}
    # Fused AdamW needs it on the device of the weights that it updates.
    return {"step": torch.tensor(float(step), device=flat.device)}
