"""Builds the objects that a rank trains with: the model on its device, the ZeRO engine, and activation offload."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import torch

from engine.attention.comm import RingComm
from engine.attention.kernels.call import Kernel
from engine.attention.kernels.choice import choose
from engine.attention.merge import choose as choose_merge
from engine.cluster.mesh import Place
from engine.config.schema import Config
from engine.cost.activations import layer_bytes
from engine.cost.model import machine
from engine.cost.stages import stages
from engine.dtypes import DTYPES
from engine.errors import MemoryFitError, Problem
from engine.family import layers
from engine.family.families import family_of
from engine.job import Job
from engine.models.build import build_model
from engine.models.common.initialise import initialise
from engine.models.common.part import Part
from engine.models.decoder import Decoder
from engine.models.parallelize import parallelize
from engine.offload.arena import Arena
from engine.offload.offload import GAPS, Offload
from engine.parallel.axes import Axes
from engine.parallel.expert import ExpertParallel
from engine.parallel.groups import Groups
from engine.parallel.pipeline import Pipeline
from engine.parallel.tensor import TensorParallel
from engine.planner.plan.order import actions
from engine.planner.plan.schedule import shard_tokens
from engine.planner.plan.step_plan import RankPlan
from engine.trainer.optimizer import build_optimizer
from engine.trainer.step import RankContext
from engine.weights.load import load_weights
from engine.zero.engine import ZeroEngine
from engine.zero.shards import gathered, sharded, stored


def build(job: Job, groups: Groups, weights: str | None = None) -> tuple[Decoder, ZeroEngine, RankContext]:
    """Build the model, its ZeRO engine, and the context of its micro-batches. All ranks must call it.

    `weights` is a Hugging Face folder to load; None initialises the weights from the run's seed.
    """
    config, settings, device, axes = job.config, job.settings, groups.device, groups.axes
    kernel = kernel_of(config, device, groups.mesh.hdp)
    part = part_of(config, groups.mesh.place(groups.rank))
    offload = make_offload(config, device, settings.host_memory, part) if settings.offload else None
    model = make_model(config, device, weights, offload, axes)
    engine = ZeroEngine(model, build_optimizer(model, config.optimizer, config.parallel.ep), config, axes)
    pipeline = None
    if axes is not None and config.parallel.pp > 1:
        dtype, hidden, tp = DTYPES[config.dtype], config.model.hidden, config.parallel.tp
        pipeline = Pipeline(axes.pp, lambda tokens: torch.empty(-(-tokens // tp), hidden, dtype=dtype, device=device))
    # On CPUs a reduction blocks the pass, whose time would then contain that of slower ranks.
    early = engine.reduce_from_here if device.type == "cuda" else None
    comm = RingComm(groups.rings)
    context = RankContext(groups.hdp_rank, device, comm, kernel, offload, pipeline, reduce_from_here=early)
    return model, engine, context


def part_of(config: Config, place: Place) -> Part:
    """Return the part of the model that the device at a place of the mesh stores."""
    cut, tp = stages(config), config.parallel.tp
    ep = config.parallel.ep
    return Part(cut[place.pp], place.pp == 0, place.pp == len(cut) - 1, tp, place.tp, ep, place.hdp % ep)


def kernel_of(
    config: Config, device: torch.device, ranks: int, plan_build_s: float | None = None, prefer: str | None = None
) -> Kernel:
    """Select the attention kernel of a rank, one of `ranks` HDP ranks, with the merge of its rings.

    Of benchmarks: `plan_build_s` replaces that of the calibration, and with 0 cuDNN serves a shape from its first call;
    `prefer` names the kernel, and ValueError is raised if it does not work here.
    """
    dtype, model = DTYPES[config.dtype], config.model
    build_s = machine(config).plan_build_s if plan_build_s is None else plan_build_s
    kernel = choose(device, dtype, model.head_dim, prefer, build_s)
    if ranks == 1 and config.parallel.pp == 1:  # no rings, and no slices
        return kernel
    heads = model.heads // config.parallel.tp
    return replace(kernel, merge=choose_merge(device, dtype, heads, model.head_dim, config.compile))


def make_model(
    config: Config,
    device: torch.device,
    weights: str | None = None,
    offload: Offload | None = None,
    axes: Axes | None = None,
) -> Decoder:
    """Create the model of a config on a device, with all that `parallelize` applies.

    All ranks must call it. Weights are loaded from the Hugging Face folder `weights`, or initialised from the run's
    seed if it is None. `axes` are the groups of this rank, which has a part of the model; None if it has all of it.
    """
    part = part_of(config, axes.place) if axes else None
    tensor = TensorParallel(axes.tp, config.model.vocab) if axes and config.parallel.tp > 1 else None
    with torch.device(device), sharded(config, axes):
        model = build_model(config, part).to(DTYPES[config.dtype])
    if weights is None:
        initialise(model, config.run.seed, device, stored)
    else:
        load_weights(model, config.model, Path(weights), gathered)
    parallelize(model, config, device, offload, tensor, ExpertParallel(axes.ep) if axes and axes.ep else None)
    return model


def make_offload(config: Config, device: torch.device, host_bytes: int, part: Part | None = None) -> Offload:
    """Create the activation offload of a device with a part of the model, or all of it.

    Plans offload at most `host_bytes` on a device, for all micro-batches that it has in flight in a pipeline, each with
    a separate arena. The limit of an arena is larger by the padding that aligns tensors, which plans do not count.
    Without it, the last tensors of a micro-batch that offloads all of `host_bytes` would stay on the device.
    """
    part = part or Part.whole(config.model)
    own = len(part.layers)
    own_kinds = layers.part(family_of(config.model).layers(config.model), part.layers)
    saved = (layer_bytes(config.model, kind, config.dtype, config.recompute, config.mlp_tile) for kind in own_kinds)
    return Offload(own, device, [Arena(device, host_bytes + own * GAPS)], max(saved) // part.tp)


def reserve_host(plan: RankPlan, hdp_rank: int, offload: Offload, stage: int = 0) -> Problem | None:
    """Allocate the host memory of a rank, or of one stage of it: as much as the micro-batch that offloads the most
    needs, for each of those that are in flight at once.

    Returns the problem if the allocation fails, else None.
    """
    ratios, largest = list[float](), (0.0, 0)
    for micro in plan.of_rank(hdp_rank):
        tokens = sum(shard_tokens(shard.length, shard.degree, shard.part) for shard in micro.shards)
        largest = max(largest, (micro.offload, tokens), key=lambda load: load[0] * load[1])
        ratios.append(micro.offload)
    done = [action.done for action in actions(plan, hdp_rank, stage) if action.kind == "run"]
    in_flight = accumulate((1 if one.forward else -1) * (ratios[one.place] > 0) for one in done)
    try:
        offload.make_room(*largest, max(1, *in_flight))
    except MemoryFitError as error:
        problem = error.problems[0]
        return replace(problem, message=f"rank {hdp_rank}: {problem.message}")
    return None
