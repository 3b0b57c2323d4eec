"""The training loop of a rank: take the plan, run it, update, log, validate, save.

All ranks run the same steps; rank 0 writes the metrics. Guards and sums of a step travel in one gather over the control
group.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.attention.comm import RingComm
from engine.attention.kernels.choice import choose
from engine.config.load import read_resolved
from engine.config.schema import Config
from engine.data.index import Index, check_fingerprint
from engine.data.reader import Reader
from engine.data.slices import micro_batch_slices
from engine.data.steps import Cursor, SequenceTable, validation_table
from engine.dtypes import DTYPES
from engine.errors import ExitCode, MemoryFitError
from engine.files import write_durably
from engine.memory.peak import peak_bytes
from engine.planner.make import PlanSettings, plan_step
from engine.planner.plan import StepPlan
from engine.simulator.timeline import balance
from engine.trainer import checkpoint as checkpoints
from engine.trainer import metrics
from engine.trainer.checkpoint import TrainState
from engine.trainer.finite import check_finite
from engine.trainer.folder import RunFolder, write_json
from engine.trainer.groups import Groups, join_groups
from engine.trainer.lineage import lineage
from engine.trainer.model import make_model, make_offload, room_for
from engine.trainer.optimizer import build_optimizer, learning_rate
from engine.trainer.planning import Feed, PlanAhead, compare_digests
from engine.trainer.step import RankContext, StepTimes, evaluate, run_step
from engine.zero.engine import ZeroEngine

_LOG = logging.getLogger(__name__)


def train(folder: RunFolder, checkpoint: Path | None, stop: Callable[[], bool]) -> int:
    """Train until the last step, or until a rank is asked to stop; return the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    config = read_resolved(folder.resolved)
    trainer = Trainer(folder, config, join_groups(), config.run.weights if checkpoint is None else None)
    trainer.begin(checkpoint)
    code = trainer.run(stop)
    trainer.close()  # not after an error: the other ranks may be gone, and the cause must be told at once
    return code


@dataclass(frozen=True)
class StepResult:
    """What a rank knows after a step; the ranks exchange it."""

    rank: int
    loss_sum: float
    times: StepTimes
    peak_memory: int | None  # bytes
    host_short: int  # bytes that the host did not give of what the plans send there
    stop: bool


class Trainer:
    """The state of a run on one rank. `begin`, then `run`, then `close`.

    Its weights are those of the Hugging Face folder `weights`, or drawn.
    """

    def __init__(self, folder: RunFolder, config: Config, groups: Groups, weights: str | None = None) -> None:
        self.folder, self.config, self.groups = folder, config, groups
        self.index = Index.load(folder.index)
        self.reader = Reader(config.data, self.index)
        self.settings = PlanSettings.of(config)
        kernel = choose(groups.device, DTYPES[config.dtype], config.model.head_dim)
        self.model = make_model(config, groups.device, weights)
        room = self.settings.host_memory
        self.model.offload = make_offload(config, groups.device, room) if self.settings.offload else None
        self.context = RankContext(groups.rank, groups.device, RingComm(groups.rings), kernel, self.model.offload)
        self.engine = ZeroEngine(self.model, build_optimizer(self.model, config.optimizer), config)
        self.ahead = PlanAhead(Feed.of(config, folder.index), self.settings, groups.rank, groups.control)
        self.validation = self._plan_validation()
        self.step, self.cursor, self.traced = 0, Cursor(), (0, False)

    def begin(self, checkpoint: Path | None) -> None:
        """Start at step 0, or go on from a checkpoint that the launcher has verified."""
        if checkpoint is not None:
            state = checkpoints.read_state(checkpoint)
            check_fingerprint(self.index, state.fingerprint)
            self.engine.load(checkpoint)
            self.step, self.cursor = state.step, Cursor(state.epoch, state.position)
        self.ahead.request(self.cursor)

    def run(self, stop: Callable[[], bool]) -> int:
        """Run the steps that are left; return OK, or PREEMPTED with a checkpoint saved."""
        while self.step < self.config.run.steps:
            stopping = self.one_step(stop)
            if stopping or self._due(self.config.run.checkpoint_every):
                self.save()
            if stopping and self.step < self.config.run.steps:
                return ExitCode.PREEMPTED
        return ExitCode.OK

    def one_step(self, stop: Callable[[], bool]) -> bool:
        """Run one step and log it; return whether some rank was asked to stop."""
        began = time.perf_counter()
        table, after, plan = self.ahead.take(self.cursor)
        planned = time.perf_counter()
        if self.step + 1 < self.config.run.steps:
            self.ahead.request(after)
        self._make_room(plan)
        loss_tokens = int(table.loss_tokens.sum())
        backward = partial(self.engine.backward, step_loss_tokens=loss_tokens)
        loss_sum, times = run_step(plan, self.engine.forward, backward, self._slicer(table), self.context)
        self.step, self.cursor = self.step + 1, after
        rate = learning_rate(self.step, self.config.run.steps, self.config.optimizer)
        grad_norm = self.engine.step(rate)
        told = self.model.end_step(self._total, loss_tokens)
        peak, offload = peak_bytes(self.groups.device), self.model.offload
        short = offload.arena.short if offload else 0
        results = self._exchange(StepResult(self.groups.rank, loss_sum, times, peak, short, stop()))
        ended = time.perf_counter()
        loss = sum(result.loss_sum for result in results) / loss_tokens
        # DeepSpeed leaves out an update whose gradients are not finite, says nothing, and gives inf as their norm.
        check_finite(self.step, self.folder.checkpoints, loss=loss, grad_norm=grad_norm)
        line = {
            "step": self.step,
            "loss": loss,
            "tokens": int(table.length.sum()),
            "tokens_per_s": int(table.length.sum()) / (ended - began),
            "step_s": ended - began,
            "plan_wait_s": planned - began,
            "data_wait_s": max(result.times.data_wait_s for result in results),
            "max_degree": int(plan.degrees.max()),
            "balance": balance(plan, self.settings),
            "grad_norm": grad_norm,
            "lr": rate,
            "peak_memory": max(result.peak_memory or 0 for result in results) or None,
            "host_short": max(result.host_short for result in results) or None,
        }
        self._log(line | told | self._validate(), plan, results)
        return any(result.stop for result in results)

    def save(self) -> None:
        """Write a checkpoint of the step that has just finished, and remove the oldest."""
        groups, run = self.groups, self.config.run
        state = TrainState(
            step=self.step,
            epoch=self.cursor.epoch,
            position=self.cursor.position,
            ranks=groups.world,
            fingerprint=self.index.fingerprint,
            lineage=lineage(self.config),
        )
        written = checkpoints.write(self.folder.checkpoints, state, groups.rank, self.engine.save, self._exchange)
        if groups.rank == 0:
            checkpoints.prune(written, run.keep_checkpoints)

    def close(self) -> None:
        """End the planning process and leave the groups."""
        self.ahead.close()
        dist.destroy_process_group()

    def _make_room(self, plan: StepPlan) -> None:
        """Let all ranks have the room on their hosts that the step takes; save what is trained so far if one has not.

        Raises MemoryFitError on all ranks.
        """
        if self.model.offload is None:
            return
        failed = next(filter(None, self._exchange(room_for(plan, self.groups.rank, self.model.offload))), None)
        if failed is not None:
            if self.step:
                self.save()
            raise MemoryFitError.of([failed])

    def _plan_validation(self) -> tuple[SequenceTable, StepPlan] | None:
        table = validation_table(self.index, self.config.context, self.config.data.validation_tokens)
        if len(table) == 0:
            return None
        plan = plan_step(table.length, self.settings)
        compare_digests(plan.digest, self.groups.control)
        return table, plan

    def _due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.config.run.steps

    def _validate(self) -> dict[str, float]:
        if self.validation is None or not self._due(self.config.run.validate_every):
            return {}
        table, plan = self.validation
        loss_sum = evaluate(plan, self.engine.module, self._slicer(table), self.context)
        loss = sum(self._exchange(loss_sum)) / int(table.loss_tokens.sum())
        check_finite(self.step, self.folder.checkpoints, validation_loss=loss)
        return {"validation_loss": loss}

    def _log(self, line: dict[str, Any], plan: StepPlan, results: list[StepResult]) -> None:
        if self.groups.rank != 0:
            return
        metrics.append(self.folder.metrics, line)
        shows = line["max_degree"], bool((plan.degrees == 1).any())
        # The report shows a step that mixes the largest ring and whole ones; four fsyncs are too many for every step.
        if shows > self.traced or (shows == self.traced and self._due(self.config.run.checkpoint_every)):
            self.traced = shows
            spans = [[result.rank, *span] for result in results for span in result.times.spans]
            write_durably(self.folder.plan, plan.to_bytes())
            write_json(self.folder.trace, {"step": line["step"], "spans": spans})

    def _slicer(self, table: SequenceTable) -> Callable[..., Any]:
        return partial(micro_batch_slices, self.reader, table)

    def _total(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` over all ranks."""
        total = values.cpu()
        dist.all_reduce(total, group=self.groups.control)
        return total.to(values.device)

    def _exchange(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.groups.world
        dist.all_gather_object(values, value, group=self.groups.control)
        return values
