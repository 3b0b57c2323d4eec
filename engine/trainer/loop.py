"""The training loop of a rank: plan a step, run it, update the weights, log, validate and save.

All ranks run the same steps. Global rank 0 writes the metrics.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch.distributed as dist

from engine.config.schema import Config
from engine.data.corpus import check_fingerprint
from engine.data.steps import Cursor, SequenceTable
from engine.errors import ExitCode, MemoryFitError
from engine.models.build import end_step
from engine.offload.peak import peak_bytes
from engine.parallel.groups import Groups
from engine.planner.make import plan_step
from engine.planner.neighbours import neighbours
from engine.planner.plan.step_plan import StepPlan
from engine.planner.settings import PlanSettings
from engine.run import checkpoints, metrics
from engine.run.compatibility import must_match
from engine.run.folder import RunFolder
from engine.trainer.control import Control
from engine.trainer.feed import Feed, tokens_of
from engine.trainer.finite import check_finite
from engine.trainer.model import build, reserve_host
from engine.trainer.optimizer import learning_rate
from engine.trainer.planning import PlanAhead
from engine.trainer.step import evaluate, run_step
from engine.trainer.trace import Trace


class Trainer:
    """Trains on one rank. Call `begin`, then `run`, then `close`.

    Initial weights are read from the Hugging Face folder `weights`; without it they are random, from the run's seed.
    """

    def __init__(self, folder: RunFolder, config: Config, groups: Groups, weights: str | None = None) -> None:
        self.folder, self.config, self.groups = folder, config, groups
        self.control, self.trace = Control(groups.control), Trace(folder, groups)
        self.settings = PlanSettings.of(config)
        self.model, self.engine, self.context = build(config, groups, self.settings, weights)
        self.context.comm.meet(neighbours(groups.hdp_rank, self.settings), groups.device)
        self.feed = Feed(config, tokens_of(folder))
        self.ahead = PlanAhead(self.feed, self.settings)
        self.validation: tuple[SequenceTable, StepPlan] | None = None
        table = self.feed.validation()
        if len(table) > 0:
            plan = plan_step(table.length, self.settings)
            self.control.check_same(plan.digest)
            self.validation = table, plan
        self.step, self.cursor = 0, Cursor()

    def begin(self, checkpoint: Path | None) -> None:
        """Resume from a checkpoint that the launcher has verified, or start at step 0 if it is None."""
        if checkpoint is not None:
            state = checkpoints.read_state(checkpoint)
            check_fingerprint(self.feed.corpus, state.fingerprint)
            self.engine.load(checkpoint)
            self.step, self.cursor = state.step, Cursor(state.epoch, state.position)
            self.trace.resume(self.control)
        self.ahead.request(self.cursor)

    def run(self, stop: Callable[[], bool]) -> int:
        """Run the remaining steps. `stop()` says whether this rank was asked to stop; it is called once per step.

        Returns ExitCode.OK, or PREEMPTED if a rank was asked to stop; then a checkpoint has been saved.
        """
        while self.step < self.config.run.steps:
            stopping = self.one_step(stop)
            if stopping or self._due(self.config.run.checkpoint_every):
                self.save()
            if stopping and self.step < self.config.run.steps:
                return ExitCode.PREEMPTED
        return ExitCode.OK

    def one_step(self, stop: Callable[[], bool]) -> bool:
        """Run one step and log it. Returns whether any rank was asked to stop."""
        # Take the plan. The next step is planned while this one runs.
        began = time.perf_counter()
        planned = self.ahead.take()
        plan_wait_s = time.perf_counter() - began
        plan, tokens, loss_tokens = planned.plan, int(planned.table.length.sum()), int(planned.table.loss_tokens.sum())
        if self.step + 1 < self.config.run.steps:
            self.ahead.request(planned.after)
        self.control.check_same(plan.digest)
        self._reserve_host(plan)

        # Run and update. Until `engine.step` returns the norm, the host does not wait for the device.
        backward = partial(self.engine.backward, step_loss_tokens=loss_tokens)
        loss_sum, times = run_step(plan, self.engine.forward, backward, self.feed.slicer(planned.table), self.context)
        self.step, self.cursor = self.step + 1, planned.after
        rate = learning_rate(self.step, self.config.run.steps, self.config.optimizer)
        grad_norm = self.engine.step(rate)
        of_model = end_step(self.model, self.groups.sum, loss_tokens)

        # Log. Ranks reduce only a few numbers, at any world size.
        offload, peak = self.context.offload, peak_bytes(self.groups.device)
        loss = self.control.total(loss_sum.item()) / loss_tokens
        data_wait_s, peak_memory, host_short, stopping = self.control.largest(
            times.data_wait_s, peak or 0, offload.arena.pop_short() if offload else 0, stop()
        )
        step_s = time.perf_counter() - began
        # If a gradient is not finite, DeepSpeed silently skips the update and returns inf as the norm.
        check_finite(self.step, self.folder.checkpoints, loss=loss, grad_norm=grad_norm)
        line = {
            "step": self.step,
            "loss": loss,
            "tokens": tokens,
            "tokens_per_s": tokens / step_s,
            "step_s": step_s,
            "plan_wait_s": plan_wait_s,
            "data_wait_s": data_wait_s,
            "max_degree": int(plan.degrees.max()),
            "balance": planned.balance,
            "grad_norm": grad_norm,
            "lr": rate,
            "peak_memory": int(peak_memory) or None,
            "host_short": int(host_short) or None,
            **of_model,
            **self._validate(),
        }
        if self.groups.rank == 0:
            metrics.append(self.folder.metrics, line)
        self.trace.record(self.step, plan, times, self._due(self.config.run.checkpoint_every))
        return bool(stopping)

    def save(self) -> None:
        """Write a checkpoint of the last finished step, and remove old ones. All ranks must call it."""
        state = checkpoints.TrainState(
            step=self.step,
            epoch=self.cursor.epoch,
            position=self.cursor.position,
            ranks=self.groups.mesh.ranks,
            fingerprint=self.feed.corpus.fingerprint,
            must_match=must_match(self.config),
        )
        rank = self.groups.rank
        written = checkpoints.write(self.folder.checkpoints, state, rank, self.engine.save, self.control.gather)
        if rank == 0:
            checkpoints.prune(written, self.config.run.keep_checkpoints)

    def close(self) -> None:
        """End the planning process and destroy the process groups."""
        self.ahead.close()
        dist.destroy_process_group()

    def _due(self, every: int) -> bool:
        """Return whether the number of finished steps is a multiple of `every`, or all steps are finished."""
        return self.step % every == 0 or self.step == self.config.run.steps

    def _reserve_host(self, plan: StepPlan) -> None:
        """Allocate the host memory for the step's offloaded activations.

        If that fails on any rank, all ranks save a checkpoint of the last finished step, if there is one, and raise
        MemoryFitError. All ranks must call it.
        """
        if self.context.offload is None:
            return
        problem = reserve_host(plan, self.groups.hdp_rank, self.context.offload)
        (failed,) = self.control.largest(problem is not None)
        if failed:
            problems = self.control.gather(problem)
            if self.step:
                self.save()
            raise MemoryFitError.of([next(filter(None, problems))])

    def _validate(self) -> dict[str, float]:
        """Return the validation loss as a metric; empty in steps without validation. All ranks must call it."""
        if self.validation is None or not self._due(self.config.run.validate_every):
            return {}
        table, plan = self.validation
        loss_sum = evaluate(plan, self.engine.module, self.feed.slicer(table), self.context).item()
        loss = self.control.total(loss_sum) / int(table.loss_tokens.sum())
        check_finite(self.step, self.folder.checkpoints, validation_loss=loss)
        return {"validation_loss": loss}
