"""One rank that measures: first training steps, then single operations with the trainer's engine."""

from __future__ import annotations

import numpy as np
import torch

from engine.config.load import read_resolved
from engine.config.schema import Config
from engine.control.control import Control
from engine.cost.sizes import parameters
from engine.errors import ExitCode
from engine.hardware import device, micro_batches
from engine.hardware.measured import RESULT, Case, Measured, Timing, cases
from engine.hardware.prepare import longest, with_layers
from engine.hardware.shape_build import builder, shape_build_s
from engine.hardware.timing import Run, interleaved, timed
from engine.parallel.groups import Groups, join_groups
from engine.readers import LARGE, read_object
from engine.report.boxes import Span
from engine.run.folder import RunFolder
from engine.run.metrics import read_metrics
from engine.trainer.loop import Trainer
from engine.trainer.model import make_model
from engine.trainer.optimizer import build_optimizer
from engine.zero.engine import ZeroEngine

_STEPS, _WARM = 14, 4  # training steps; the first ones, which warm up, are not counted
_TOO_LONG_S = 2.0  # micro-batches that take longer are skipped
# Approximate fractions of the time: each measurement is made at least three times, however long it takes.
_MICRO_BATCHES, _SHARDED, _TRANSFERS, _OVERLAP, _UPDATES = 0.75, 0.03, 0.04, 0.02, 0.06
_HALF, _PRODUCT, _COPIES = 0.02, 0.02, 0.03
_WIDE = {"layers": 1, "hidden": 64, "heads": 1, "kv_heads": 1, "ffn": 64, "tied": False}  # a few large matrices
_WIDE_VOCAB = {"cpu": 1 << 15, "cuda": 1 << 20}


def measure(folder: RunFolder, seconds: float, control: Control) -> int:
    """Measure for about `seconds`, on all ranks at once. Rank 0 writes the file that `measured.read` reads.

    Returns the exit code.
    """
    config = read_resolved(folder.resolved)
    groups = join_groups(config, control)
    trainer = Trainer(folder, config, groups)
    context, shape, module = trainer.context, config.model, trainer.engine.module
    # Training steps come first: the other measurements disturb the state of the trainer.
    trainer.begin(None)
    fixed = []  # seconds of each step outside its micro-batches: planning, reduction, update, exchange
    for step in range(_STEPS):
        trainer.one_step(lambda: False)
        if groups.rank == 0 and step >= _WARM:
            trace = read_object(folder.trace, LARGE)
            line = read_metrics(folder.metrics)[-1]
            # A trace is kept for the newest step with the largest ring, which need not be this one.
            if trace["step"] == line["step"]:
                fixed.append(line["step_s"] - max(Span(*span).stop_s for span in trace["spans"]))
    trainer.data.close()

    # A single rank has no one to communicate with, so transfers, gathers and overlap keep their nominal values.
    several = groups.mesh.hdp > 1
    dtype = next(module.parameters()).dtype
    measured = Measured(
        fixed_s=float(control.gather(np.median(fixed) if fixed else 0.0)[0]),
        device=device.name(groups.device),
        ranks=groups.mesh.hdp,
        layers=shape.layers,
        micro_batches=_micro_batches(config, groups, trainer, _MICRO_BATCHES * seconds),
        transfers=device.transfers(context.comm, groups, _TRANSFERS * seconds) if several else (),
        sharded=_sharded(config, groups, trainer, _SHARDED * seconds) if several else None,
        overlap=device.overlap(context.comm, groups, _OVERLAP * seconds) if several else 0.0,
        updates=_updates(config, groups, trainer, _UPDATES * seconds),
        half_tokens=device.half_tokens(shape, dtype, groups, _HALF * seconds),
        product_flops_per_s=device.product_flops_per_s(dtype, groups, _PRODUCT * seconds),
        copies=device.copies(groups, _COPIES * seconds),
        memory_bytes_per_s=device.memory_bytes_per_s(config.optimizer, config.dtype, groups, _COPIES * seconds),
        kernel=context.kernel.name,
        shape_build_s=shape_build_s(builder(context.kernel), shape, dtype, groups),
    )
    if groups.rank == 0:
        measured.write(folder.root / RESULT)
    trainer.close()
    return ExitCode.OK


def _micro_batches(config: Config, groups: Groups, trainer: Trainer, seconds: float) -> tuple[tuple[Case, Timing], ...]:
    """Time the micro-batches of `measured.cases`, in the order of their estimated cost.

    The result ends with the first one that takes too long.
    """
    other = config.model.layers // 2 or None  # a second number of layers; none for a model of one layer
    engines = {config.model.layers: trainer.engine}
    if other is not None:
        engines[other] = build_engine(with_layers(config, other), groups)
    most = longest(config, groups.device.type, trainer.context.kernel.name)
    # Sorted by estimated cost, because `interleaved` stops at the first one that takes too long.
    todo = sorted(
        cases(config.model.layers, other, groups.mesh.hdp, most),
        key=lambda case: (
            case.layers * (sum(s * (s + 1000) for s in case.unsplit) + sum(s * (s + 1000) // 2 for s in case.ring))
        ),
    )
    runs = micro_batches.runs(todo, engines, trainer.context, groups.mesh.hdp, config.model.vocab)
    return tuple(zip(todo, interleaved(runs, groups, seconds, _TOO_LONG_S), strict=False))


def _sharded(config: Config, groups: Groups, trainer: Trainer, seconds: float) -> tuple[Timing, Timing]:
    """Time a short micro-batch of the trained model with ZeRO-1 and with ZeRO-3."""
    case, layers = Case(config.model.layers, (32,)), config.model.layers
    stage_3 = config.model_copy(update={"zero": config.zero.model_copy(update={"stage": 3})})
    engines = (trainer.engine, build_engine(stage_3, groups))
    ranks, vocab = groups.mesh.hdp, config.model.vocab
    todo = [micro_batches.runs([case], {layers: engine}, trainer.context, ranks, vocab)[0] for engine in engines]
    whole, sharded = interleaved(todo, groups, seconds)
    return whole, sharded


def _updates(config: Config, groups: Groups, trainer: Trainer, seconds: float) -> tuple[tuple[int, float], ...]:
    """Time the optimizer's step of the trained model and of a larger one; return (parameters, seconds) of each."""
    wide = config.model.model_copy(update=_WIDE | {"vocab": _WIDE_VOCAB[groups.device.type]})
    large = config.model_copy(update={"model": wide})
    sized = ((config, trainer.engine), (large, build_engine(large, groups)))

    def update(engine: ZeroEngine, vocab: int) -> Run:
        (micro_batch,) = micro_batches.runs([Case(1, (32,))], {1: engine}, trainer.context, groups.mesh.hdp, vocab)

        step = timed(lambda: engine.step(1e-6), groups.device)

        def run() -> tuple[float, float]:
            micro_batch()  # gradients for the update; not timed
            torch.distributed.barrier()
            return step()

        return run

    timings = interleaved([update(engine, sizes.model.vocab) for sizes, engine in sized], groups, seconds)
    return tuple((parameters(sizes.model), timing.total_s) for (sizes, _), timing in zip(sized, timings, strict=True))


def build_engine(config: Config, groups: Groups) -> ZeroEngine:
    """Build a model with the weights of its seed, and its optimizer."""
    model = make_model(config, groups.device)
    return ZeroEngine(model, build_optimizer(model, config.optimizer), config)
