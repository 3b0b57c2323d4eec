"""Builds the objects that a rank trains with: the model on its device, the ZeRO engine, and activation offload."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from engine.attention.comm import RingComm
from engine.attention.kernels.call import Kernel
from engine.attention.kernels.choice import choose
from engine.attention.merge import choose as choose_merge
from engine.config.schema import Config
from engine.cost.activations import layers_bytes
from engine.cost.model import machine
from engine.dtypes import DTYPES
from engine.errors import MemoryFitError, Problem
from engine.models.build import Transformer, build_model
from engine.models.common.initialise import initialise
from engine.models.parallelize import parallelize
from engine.offload.arena import Arena
from engine.offload.offload import GAPS, Offload
from engine.parallel.groups import Groups
from engine.planner.plan.loads import micro_tokens
from engine.planner.plan.step_plan import StepPlan
from engine.planner.settings import PlanSettings
from engine.trainer.optimizer import build_optimizer
from engine.trainer.step import RankContext
from engine.units import PPM
from engine.weights.load import load_weights
from engine.zero.engine import ZeroEngine
from engine.zero.shards import gathered, sharded, stored


def build(
    config: Config, groups: Groups, settings: PlanSettings, weights: str | None = None
) -> tuple[Transformer, ZeroEngine, RankContext]:
    """Build the model, its ZeRO engine, and the context of its micro-batches. All ranks must call it.

    `weights` is a Hugging Face folder to load; None initialises the weights from the run's seed.
    """
    kernel = kernel_of(config, groups.device, groups.mesh.hdp)
    offload = make_offload(config, groups.device, settings.host_memory) if settings.offload else None
    model = make_model(config, groups.device, weights, offload)
    engine = ZeroEngine(model, build_optimizer(model, config.optimizer), config)
    context = RankContext(groups.hdp_rank, groups.device, RingComm(groups.rings), kernel, offload)
    return model, engine, context


def kernel_of(config: Config, device: torch.device, ranks: int, plan_build_s: float | None = None) -> Kernel:
    """Select the attention kernel of a rank, one of `ranks` HDP ranks, with the merge of its rings.

    `plan_build_s` replaces that of the calibration. Benchmarks pass 0: cuDNN then serves a shape from its first call.
    """
    dtype, model = DTYPES[config.dtype], config.model
    build_s = machine(config).plan_build_s if plan_build_s is None else plan_build_s
    kernel = choose(device, dtype, model.head_dim, plan_build_s=build_s)
    if ranks == 1:  # no rings
        return kernel
    return replace(kernel, merge=choose_merge(device, dtype, model.heads, model.head_dim, config.compile))


def make_model(
    config: Config, device: torch.device, weights: str | None = None, offload: Offload | None = None
) -> Transformer:
    """Create the model of a config on a device, with recompute, tiles, offload and compiled operations applied.

    All ranks must call it. Weights are loaded from the Hugging Face folder `weights`, or initialised from the run's
    seed if it is None.
    """
    with torch.device(device), sharded(config):
        model = build_model(config).to(DTYPES[config.dtype])
    if weights is None:
        initialise(model, config.run.seed, device, stored)
    else:
        load_weights(model, config.model, Path(weights), gathered)
    parallelize(model, config, device, offload)
    return model


def make_offload(config: Config, device: torch.device, host_bytes: int) -> Offload:
    """Create the activation offload of a rank. Plans offload at most `host_bytes` in a micro-batch.

    The limit of the host arena is larger by the padding that aligns tensors, which plans do not count. Without it, the
    last tensors of a micro-batch that offloads all of `host_bytes` would stay on the device.
    """
    layers = config.model.layers
    saved = layers_bytes(config.model, config.dtype, config.recompute, config.mlp_tile) // layers
    return Offload(layers, device, Arena(device, host_bytes + layers * GAPS), saved)


def reserve_host(plan: StepPlan, hdp_rank: int, offload: Offload) -> Problem | None:
    """Allocate a rank's host memory, as much as the micro-batch that offloads the most needs.

    Returns the problem if the allocation fails, else None.
    """
    mine = slice(plan.micro_start[hdp_rank], plan.micro_start[hdp_rank + 1])
    loads = zip(plan.offload[mine].tolist(), micro_tokens(plan)[mine].tolist(), strict=True)
    ratio, tokens = max(loads, key=lambda load: load[0] * load[1])
    try:
        offload.make_room(ratio / PPM, tokens)
    except MemoryFitError as error:
        problem = error.problems[0]
        return replace(problem, message=f"rank {hdp_rank}: {problem.message}")
    return None
