"""One rank that measures: real steps of the trainer first, then everything else with the trainer's own engine."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import torch

from engine.config.load import read_resolved
from engine.config.schema import Config
from engine.cost.states import parameters
from engine.errors import ExitCode
from engine.hardware import activations, device, micro_batches
from engine.hardware.cases import cases
from engine.hardware.measured import RESULT, Case, Measured, Timing
from engine.hardware.prepare import longest, other_layers, with_layers
from engine.hardware.timing import QUANTILE, Run, Stopwatch, gather, interleaved
from engine.trainer.folder import RunFolder
from engine.trainer.groups import Groups, join_groups
from engine.trainer.loop import Trainer
from engine.trainer.metrics import read_metrics
from engine.trainer.model import make_model
from engine.trainer.optimizer import build_optimizer
from engine.trainer.step import RankContext
from engine.zero.engine import ZeroEngine

_STEPS, _WARM = 14, 4
_TOO_LONG_S = 2.0  # of a micro-batch: longer ones are left out
# Each part's share of the time, about: whatever it takes, no part is repeated fewer than a few times.
_SHARES = {"micro_batches": 0.8, "transfers": 0.04, "overlap": 0.02, "updates": 0.06}
_SHARES |= {"half": 0.02, "product": 0.02, "copies": 0.02}
_WIDE = {"layers": 1, "hidden": 64, "heads": 1, "kv_heads": 1, "ffn": 64, "tied": False}  # a model of a few matrices
_WIDE_VOCAB = {"cpu": 1 << 15, "cuda": 1 << 20}


def measure(folder: RunFolder, seconds: float) -> int:
    """Measure for about `seconds`, on all ranks at once; rank 0 writes what `measured.read` reads. Returns OK."""
    config = read_resolved(folder.resolved)
    groups = join_groups()
    trainer = Trainer(folder, config, groups)
    measured = _measure(config, groups, trainer, {part: share * seconds for part, share in _SHARES.items()})
    if groups.rank == 0:
        measured.write(folder.root / RESULT)
    trainer.close()
    return ExitCode.OK


def _measure(config: Config, groups: Groups, trainer: Trainer, seconds: Mapping[str, float]) -> Measured:
    shape, context, several = config.model, trainer.context, groups.world > 1
    dtype = next(trainer.engine.module.parameters()).dtype
    fixed_s = _fixed_seconds(trainer, groups)
    return Measured(
        device=device.name(groups.device),
        ranks=groups.world,
        layers=shape.layers,
        fixed_s=fixed_s,
        micro_batches=_micro_batches(config, groups, trainer, seconds["micro_batches"]),
        transfers=device.transfers(context, groups, seconds["transfers"]) if several else (),
        overlap=device.overlap(context, groups, seconds["overlap"]) if several else 0.0,
        updates=_updates(config, groups, trainer, seconds["updates"]),
        saved=activations.saved(trainer.engine.module, context, longest(config, groups.device.type)),
        half_tokens=device.half_tokens(shape, dtype, groups, seconds["half"]),
        product_flops_per_s=device.product_flops_per_s(dtype, groups, seconds["product"]),
        copy_bytes_per_s=device.copy_bytes_per_s(groups, seconds["copies"]),
        memory_bytes_per_s=device.memory_bytes_per_s(config.optimizer, config.dtype, groups, seconds["copies"]),
    )


def _fixed_seconds(trainer: Trainer, groups: Groups) -> float:
    """Return what a real step takes beside its micro-batches: plan, reduction, update, exchange. A quartile of some."""
    trainer.begin(None)
    fixed = []
    for step in range(_STEPS):
        trainer.one_step(lambda: False)
        if groups.rank == 0 and step >= _WARM:
            trace = json.loads(trainer.folder.trace.read_text(encoding="utf-8"))
            line = read_metrics(trainer.folder.metrics)[-1]
            if trace["step"] == line["step"]:  # the trace is that of the newest step with the largest ring
                fixed.append(line["step_s"] - max(stop for _, _, _, stop in trace["spans"]))
    trainer.ahead.close()
    return float(gather(np.quantile(fixed, QUANTILE) if fixed else 0.0, groups)[0])


def _micro_batches(config: Config, groups: Groups, trainer: Trainer, seconds: float) -> tuple[tuple[Case, Timing], ...]:
    other = other_layers(config.model)
    engines = {config.model.layers: trainer.engine}
    if other is not None:
        engines[other] = _engine(with_layers(config, other), groups)
    most = longest(config, groups.device.type)
    todo = sorted(cases(config.model.layers, other, groups.world, most), key=_cost)
    runs = micro_batches.runs(todo, engines, trainer.context, groups.world, config.model.vocab)
    timed = interleaved(runs, groups, seconds, _TOO_LONG_S)
    return tuple(zip(todo, timed, strict=False))


def _cost(case: Case) -> int:
    """Return about what a case costs: longest sequences last."""
    return case.layers * (sum(s * (s + 1000) for s in case.whole) + sum(s * (s + 1000) // 2 for s in case.shared))


def _updates(config: Config, groups: Groups, trainer: Trainer, seconds: float) -> tuple[tuple[int, float], ...]:
    """Return (parameters, seconds) of the optimizer's step of the trained model and of a larger one."""
    wide = config.model.model_copy(update=_WIDE | {"vocab": _WIDE_VOCAB[groups.device.type]})
    large = config.model_copy(update={"model": wide})
    sized = ((config, trainer.engine), (large, _engine(large, groups)))
    runs = [_update(engine, trainer.context, groups, sizes.model.vocab) for sizes, engine in sized]
    timed = interleaved(runs, groups, seconds)
    return tuple((parameters(sizes.model), timing.total_s) for (sizes, _), timing in zip(sized, timed, strict=True))


def _update(engine: ZeroEngine, context: RankContext, groups: Groups, vocab: int) -> Run:
    (step,) = micro_batches.runs([Case(1, (32,))], {1: engine}, context, groups.world, vocab)
    watch = Stopwatch(groups.device)

    def run() -> tuple[float, float]:
        step()
        torch.distributed.barrier(groups.control)
        began = watch.now()
        engine.step(1e-6)
        return watch.now() - began, 0.0

    return run


def _engine(config: Config, groups: Groups) -> ZeroEngine:
    model = make_model(config, groups.device)
    return ZeroEngine(model, build_optimizer(model, config.optimizer), config)
