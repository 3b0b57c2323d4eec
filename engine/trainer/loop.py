"""The training loop of a rank: plan a step, run it, update the weights, log, validate and save.

All ranks run the same steps. Global rank 0 writes the metrics.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.config import schema
from engine.config.schema import Config
from engine.config.sources import source_configs
from engine.config.units import counted
from engine.control import progress
from engine.control.link import NODE_SOCKETS, inherited
from engine.cost.model import known_peak
from engine.data.ledger import Ledger
from engine.data.mixture import SCALE, segments_of
from engine.data.opening import validation_shares
from engine.data.overview import tokenizer_facts
from engine.data.quarantine import Dropped, Quarantine, Unusable
from engine.data.runtime.runtime import Planned, PlannedSequences
from engine.data.runtime.runtimes import RUNTIMES
from engine.data.sequences import SequenceTable
from engine.data.steps import Cursor, waiting_at
from engine.errors import CheckpointError, ExitCode, MemoryFitError, Problem
from engine.fit.estimate import most_on_host
from engine.folders import random_name
from engine.job import Job
from engine.offload.peak import peak_bytes
from engine.parallel.groups import Groups
from engine.planner.plan.loads import unsplit_share
from engine.planner.plan.step_plan import RankPlan, StepPlan
from engine.planner.planners import peers_of
from engine.run import checkpoints, metrics
from engine.run.background import BackgroundWriter
from engine.run.compatibility import check_fingerprints, must_match, read_fingerprints
from engine.run.folder import Held, RunFolder
from engine.run.journal import Journal
from engine.trainer.finite import DivergedError, diverged, documents_of
from engine.trainer.model import build, reserve_host
from engine.trainer.pace import Pace
from engine.trainer.schedule import learning_rate
from engine.trainer.step import StepTimes, evaluate, run_step
from engine.trainer.trace import Trace


class Trainer:
    """Trains on one rank. Call `begin`, then `run`, then `close`.

    Initial weights are read from the Hugging Face folder `weights`; without it they are random, from the run's seed.
    """

    def __init__(self, folder: RunFolder, config: Config, groups: Groups, weights: str | None = None) -> None:
        self.folder, self.config, self.groups = folder, config, groups
        self.control, self.trace, self.held = groups.control, Trace(folder, groups), Held(folder)
        self.ledger = Ledger(folder.ledger, list(source_configs(config.data)))
        self.quarantine = Quarantine(folder.quarantine)
        self.dropped = Dropped()
        job = Job(config)
        self.settings = job.settings
        peak = known_peak(config)
        self.peak = peak and peak * groups.mesh.ranks  # FLOP/s of all devices
        self.pace = Pace(self.settings.costs, self.settings.costs.work_shares[groups.mesh.place(groups.rank).pp])
        self.model, self.engine, self.context = build(job, groups, weights)
        self.context.comm.meet(peers_of(groups.hdp_rank, self.settings), groups.device)
        (token,) = self.control.gather(random_name() if groups.rank == 0 else None)
        self.writer = BackgroundWriter(folder.checkpoints, groups.rank, token, self.control)
        self.journal = Journal()
        self.fingerprints, self.tokenizer = read_fingerprints(folder), tokenizer_facts(config.data)
        open_runtime, first = RUNTIMES[config.data.runtime], groups.local_rank == 0
        self.data = open_runtime(folder, job, self.control, inherited(NODE_SOCKETS), first)
        self.validation: Mapping[str, PlannedSequences] = {}  # by source
        self.unvalidated: list[str] = []  # sources whose validation set is empty
        self.copies = most_on_host(job).checkpoint > 0
        self.step, self.cursor = 0, Cursor()
        self.saved = 0  # step of the last checkpoint
        self.of_save: dict[str, Any] = {}  # metrics of the last checkpoint, for the next line
        self.skipped = 0  # of the last steps, in a row
        self.ended: str | None = None  # why there are no more steps before run.steps, as `Steps.ended`

    def verify(self, checkpoint: Path) -> None:
        """Compare this rank's part of a checkpoint with its hashes. All ranks must call it, before `begin`.

        If a part is damaged, all ranks raise the same CheckpointError, and the launcher chooses another checkpoint.
        """
        problem = None
        progress.report("verify")
        try:
            checkpoints.check_hashes(checkpoint, self.groups.rank, self.groups.mesh.ranks)
        except CheckpointError as error:
            problem = error.problems[0]
        if problems := self.control.gather(problem and asdict(problem)):
            raise CheckpointError.of([Problem(**problems[0])])

    def begin(self, checkpoint: Path | None) -> None:
        """Resume from a checkpoint that `verify` has checked, or start at step 0 if it is None."""
        if checkpoint is not None:
            state = checkpoints.read_state(checkpoint)
            check_fingerprints(self.fingerprints, state.fingerprints)
            self.fingerprints = {**state.fingerprints, **self.fingerprints}  # a source that is left out may come back
            self.tokenizer = self.tokenizer or state.tokenizer
            self.engine.load(checkpoint)
            self.step, self.saved, self.cursor = state.step, state.step, Cursor.of_json(state.cursor)
            self.skipped = state.skipped
            self.trace.resume(self.control)
        # The checkpoint has the order of documents, on which the validation sets depend.
        self.validation = self.data.validation(self.cursor.order)
        for validated in self.validation.values():
            self.control.check_same(validated.plan.digest)
        shares = validation_shares(self.config.data) if self.config.data.validation_tokens else {}
        self.unvalidated = [name for name, share in shares.items() if share and name not in self.validation]
        self.data.request(self.cursor)

    def run(self, stop: Callable[[], bool]) -> int:
        """Run the remaining steps. `stop()` says whether this rank was asked to stop; it is called once per step.

        The run also ends when `data.exhausted` and `data.mix` leave no more documents: like any last step, that one
        validates and saves. Returns ExitCode.OK, or PREEMPTED if a rank was asked to stop; then a checkpoint has been
        saved.
        """
        # Allocated after the first step, when the optimizer has states, and in another thread, since it takes longer
        # than the copy itself. A checkpoint that is due at once allocates by itself.
        reserved = not self.copies
        while not self._finished:
            try:
                stopping = self.one_step(stop)
                if saving := stopping or self._due(self.config.run.checkpoint_every):
                    self.held.check()  # else a new folder would get the checkpoint, and could not be resumed
                    self.save()
            except BaseException as error:
                self.journal.leave()  # what is kept of the steps before the error is still written
                if isinstance(error, OSError):
                    self.held.check()
                    self.writer.check()  # a checkpoint that has filled the disk is the cause, not a step's next line
                raise
            if not (reserved or saving):
                self.engine.reserve_snapshot()
            reserved = True
            if stopping:
                break
        self._finish_save()
        self.held.check()
        return ExitCode.OK if self._finished else ExitCode.PREEMPTED

    def one_step(self, stop: Callable[[], bool]) -> bool:
        """Run one step and log it. Returns whether any rank was asked to stop."""
        # A checkpoint that could not be written ends the run here, before another step is computed.
        self.writer.check()
        self.journal.check()
        began = time.perf_counter()
        progress.report("plan", step=self.step + 1)
        planned = self.data.take()
        plan_wait_s = time.perf_counter() - began
        if self.step + 1 < self.config.run.steps and planned.ended is None:
            self.data.request(planned.after)  # the next step is planned while this one runs
        plan, loss_tokens = planned.plan, max(1, planned.loss_tokens)
        # Each node plans for itself. Ranks with different plans would wait for each other forever, so a difference ends
        # the run before the first transfer.
        self.control.check_same(plan.digest)
        self._reserve_host(plan)

        progress.tell_planned(planned.step_s)
        # Until `engine.step` returns the norm, the host does not wait for the device.
        backward = partial(self.engine.backward, step_loss_tokens=loss_tokens)
        loss_sum, times = run_step(plan, self.engine.forward, backward, self.data.input_reader(planned), self.context)
        # The documents count as read even if the update is skipped below: otherwise the next step would read them
        # again.
        self.step, self.cursor, self.ended = self.step + 1, planned.after, planned.ended
        progress.report("reduce")
        rate = learning_rate(self.step, self.config.run.steps, self.config.optimizer)
        grad_norm = self.engine.step(rate)
        updated = math.isfinite(grad_norm)  # the same on all ranks
        of_model = self.model.end_step(self.groups.sum, loss_tokens, updated)

        # Ranks reduce only a few numbers, at any world size.
        progress.report("log")
        offload, peak, run = self.context.offload, peak_bytes(self.groups.device), self.config.run
        loss = self.groups.sum(loss_sum).item() / loss_tokens
        data_wait_s, peak_memory, host_short, stopping = self.control.largest(
            times.data_wait_s, peak or 0, offload.pop_short() if offload else 0, stop()
        )
        # Validation comes later, so its time is not part of the step.
        step_s = time.perf_counter() - began
        # Ranks agree on `grad_norm`, so all of them skip the update or raise, and none is left waiting for another.
        self.skipped = 0 if updated else self.skipped + 1
        if self.skipped > (run.max_skips if run.on_nan == "skip" else 0):
            raise self._diverged_step(planned, times, loss, grad_norm)
        of_validation = self._validate()
        # None stands for numbers that are not finite, which JSON lacks.
        line = {
            "step": self.step,
            "loss": loss if math.isfinite(loss) else None,
            "tokens": plan.tokens,
            "tokens_per_s": plan.tokens / step_s,
            "step_s": step_s,
            "plan_wait_s": plan_wait_s,
            "data_wait_s": data_wait_s,
            "max_degree": plan.max_degree,
            "balance": planned.balance,
            "grad_norm": grad_norm if updated else None,
            "lr": rate,
            "mfu": planned.flops / (self.peak * step_s) if self.peak else None,
            "unsplit": unsplit_share(plan),
            "peak_memory": int(peak_memory) or None,
            "host_short": int(host_short) or None,
        }
        self._log(line | of_model | of_validation, planned, times)
        return bool(stopping)

    def _log(self, line: dict[str, Any], planned: Planned, times: StepTimes) -> None:
        """Write the line of a step to the metrics, and what else is kept of the step. All ranks must call it."""
        line |= _mixture(self.cursor) | _waiting(self.cursor, self.config.data) | self.of_save
        self.of_save = {}
        if self.skipped:
            line["skipped"] = self.skipped  # in a row, this one included
        if self.ended and self.step < self.config.run.steps:
            line["ended"] = self.ended
        if self.unvalidated:
            line["unvalidated"] = self.unvalidated
        if self.groups.rank == 0:
            self.dropped.add(planned.dropped)
            if self.dropped.documents:
                line["dropped"] = self.dropped.documents
            if planned.packed:
                line["packed"] = {name: cost._asdict() for name, cost in planned.packed.items()}
            self.journal.add(partial(self._write, line, planned.table, planned.whole, planned.unusable))
        if (pace := self.pace.of_steps(planned.plan, times)) is not None:
            progress.tell_pace(pace)
        self.trace.record(self.step, planned.plan, times, self._due(self.config.run.checkpoint_every))

    def _write(self, line: dict[str, Any], table: SequenceTable, plan: StepPlan, unusable: Sequence[Unusable]) -> None:
        """Write what is kept of a step, the line of its metrics last: a step with metrics is in the ledger.

        Runs in the thread of the journal.
        """
        self.held.check()
        self.ledger.record(line["step"], table, plan)
        if left_out := self.quarantine.add(line["step"], unusable):
            line["left_out"] = left_out
        metrics.append(self.folder.metrics, line)

    def save(self) -> None:
        """Begin to write a checkpoint of the last finished step, and to remove old ones. All ranks must call it.

        Training continues while the states are written from a copy in host memory. It waits until an earlier checkpoint
        is written; without memory for a copy on some rank, also for this one.
        """
        progress.report("save")
        began, run = time.perf_counter(), self.config.run
        self.journal.wait()  # no checkpoint is newer than the ledger and the metrics
        self.writer.wait()
        snapshot = self.engine.snapshot(self.copies)
        (short,) = self.control.largest(snapshot.short)
        state = checkpoints.TrainState(
            step=self.step,
            cursor=self.cursor.to_json(),
            ranks=self.groups.mesh.ranks,
            fingerprints=self.fingerprints,
            must_match=must_match(self.config),
            tokenizer=self.tokenizer,
            skipped=self.skipped,
            mesh={"tp": self.groups.mesh.tp, "pp": self.groups.mesh.pp},
        )
        # Old checkpoints are removed only after the new one is published, and by the thread that publishes it.
        keep = checkpoints.Retention(run.keep_checkpoints, run.keep_every, run.keep_best)

        def prune(written: Path) -> None:
            losses = metrics.validation_losses(self.folder.metrics) if keep.best else {}
            checkpoints.prune(written, keep, losses)

        self.writer.start(state, snapshot.write_each, prune)
        if short or not self.copies:
            self.writer.wait()
        self.saved = self.step
        self.of_save = {"save_s": time.perf_counter() - began} | ({"copy_short": int(short)} if short else {})

    def _finish_save(self) -> None:
        """Wait until the last checkpoint is published. All ranks must call it.

        Ranks leave together: a rank that ends early would end the others, and one of them may still be writing.
        """
        progress.report("save")
        self.journal.wait()
        self.writer.wait()
        self.control.largest(0)

    def close(self) -> None:
        """End the processes of the data and destroy the process groups."""
        self.data.close()
        dist.destroy_process_group()

    @property
    def _finished(self) -> bool:
        """Whether all steps are finished: those of `run.steps`, or of the documents."""
        return self.step >= self.config.run.steps or self.ended is not None

    def _due(self, every: int) -> bool:
        """Return whether the number of finished steps is a multiple of `every`, or all steps are finished."""
        return self.step % every == 0 or self._finished

    def _reserve_host(self, plan: RankPlan) -> None:
        """Allocate the host memory for the step's offloaded activations.

        If that fails on any rank, all ranks save a checkpoint of the last finished step, if there is one, and raise
        MemoryFitError. All ranks must call it.
        """
        if self.context.offload is None:
            return
        stage = self.context.pipeline.stage if self.context.pipeline else 0
        problem = reserve_host(plan, self.groups.hdp_rank, self.context.offload, stage)
        if problems := self.control.gather(problem and asdict(problem)):
            if self.step > self.saved:
                self.save()
            self._finish_save()
            raise MemoryFitError.of([Problem(**problems[0])])

    def _diverged(self, where: str = "", **values: float) -> DivergedError:
        """Return the error of the step. The checkpoint that its hint names is published. All ranks must call it."""
        self._finish_save()
        return diverged(self.step, self.folder, where, **values)

    def _diverged_step(self, planned: Planned, times: StepTimes, loss: float, grad_norm: float) -> DivergedError:
        """Return the error of the step with its documents, which also enter the ledger. All ranks must call it."""
        not_finite = [index for index, of_micro in times.losses if not torch.isfinite(of_micro)]
        found = [index for of_rank in self.control.gather(not_finite or None) for index in of_rank]
        where = None
        if self.groups.rank == 0:  # others may have the documents of their own micro-batches only
            self.journal.wait()
            self.ledger.record(self.step, planned.table, planned.whole)
            where = documents_of(planned.whole, planned.table, list(source_configs(self.config.data)), found)
        (where,) = self.control.gather(where)
        if self.skipped > 1:
            where += f"; {counted(self.skipped - 1, 'update')} before it had been skipped"
        return self._diverged(where, loss=loss, grad_norm=grad_norm)

    def _validate(self) -> dict[str, Any]:
        """Return the validation loss as a metric, and that of each source if there are several.

        Empty in steps without validation. All ranks must call it.
        """
        if not self.validation or not self._due(self.config.run.validate_every):
            return {}
        sums, tokens = dict[str, float](), dict[str, int]()
        for name, planned in self.validation.items():
            read_inputs = self.data.input_reader(planned)
            loss_sum = evaluate(planned.plan, self.engine.module, read_inputs, self.context)
            sums[name], tokens[name] = self.groups.sum(loss_sum).item(), max(1, planned.loss_tokens)
        loss = sum(sums.values()) / sum(tokens.values())
        if not math.isfinite(loss):  # the same on all ranks
            raise self._diverged(validation_loss=loss)
        of_sources = {"validation_losses": {name: sums[name] / tokens[name] for name in sums}} if len(sums) > 1 else {}
        return {"validation_loss": loss} | of_sources


def _mixture(cursor: Cursor) -> dict[str, Any]:
    """Return, for several sources, how many tokens each had so far and should have had, as a metric."""
    sources = cursor.mixer["sources"] if cursor.mixer else {}
    if len(sources) < 2:
        return {}
    return {"mixture": {name: {"tokens": had, "wanted": had + debt / SCALE} for name, (had, debt) in sources.items()}}


def _waiting(cursor: Cursor, data: schema.Data) -> dict[str, Any]:
    """Return how many documents of each source wait for a segment of their lengths, and how many are left out."""
    if not cursor.waiting:
        return {}
    found = waiting_at(cursor, segments_of(data))
    return {"waiting": {name: {"waiting": waits, "left_out": left_out} for name, (waits, left_out) in found.items()}}
