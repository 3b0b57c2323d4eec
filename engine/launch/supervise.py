"""Runs the ranks until all steps are finished: starts them again from the last checkpoint after a failure.

Note: [damage found by ranks]. Ranks compare the hashes of the checkpoint, each a part: one process would take minutes.
Where they find damage, they end before they have changed anything, and the launcher compares the hashes itself: it
alone can choose another checkpoint, because metrics and ledger go back with it. Damage is rare, so this may be slow.
Ranks check what was chosen again; if they still find damage, the run ends.
"""

from __future__ import annotations

from pathlib import Path

from engine.cluster.cluster import Cluster
from engine.config.schema import Config
from engine.errors import BytescaleError, ExitCode
from engine.launch import prepare
from engine.launch.commands import node_commands
from engine.launch.join import Joins
from engine.launch.launchers import Launcher, Starts
from engine.launch.outcome import write_page
from engine.launch.ranks import PreemptedError, RankError, run_ranks
from engine.launch.restarts import Restarts
from engine.launch.say import OnStep, Say
from engine.launch.stragglers import Stragglers
from engine.launch.tail import MetricsTail
from engine.run import launches
from engine.run.checkpoints import newest_first
from engine.run.folder import RunFolder


def supervise(
    config: Config,
    cluster: Cluster,
    folder: RunFolder,
    start: prepare.Start,
    resume: str,
    say: Say,
    on_step: OnStep,
    joins: Joins | None,
) -> prepare.Start:
    """Run the ranks from `start`; return the start from which they finished.

    `resume` is what the user chose; it counts until the run has a checkpoint of its own. Raises PreemptedError if the
    run was asked to stop, PreflightError if a host cannot start its ranks, else the error of the first rank that
    failed, if no restart helps or is left.
    """
    notice = config.run.notice_file
    restarts, compared = Restarts(config.run.restarts, folder), False
    launcher: Launcher = joins or Starts()
    stragglers = Stragglers(cluster, say)
    failure: RankError | None = None  # of the last start
    while True:
        prepare.go_back(folder, start.step, say)
        say(f"{folder.root}: {start.outlook(config)}")
        if not start.plans:
            return start
        commands = node_commands(cluster, folder, start.checkpoint, config, joined_at=joins.address if joins else None)
        launches.begin(folder.launches, start.step + 1, cluster.ranks, [node.host for node in cluster.nodes])
        try:
            run_ranks(commands, folder, MetricsTail(folder, config, on_step, say), say, launcher, stragglers.note)
            launches.end(folder.launches)
            return start
        except PreemptedError as error:
            launches.end(folder.launches, str(error))
            if notice and Path(notice).exists():
                say(f"{notice} has appeared")
            write_page(folder, say)
            raise
        except BytescaleError as error:
            launches.end(folder.launches, str(error))
            write_page(folder, say)
            if failure is not None and not isinstance(error, RankError):
                raise error from failure
            if not (isinstance(error, RankError) and launcher.restarts):
                raise
            damaged = error.code == ExitCode.NO_CHECKPOINT and start.checkpoint is not None and not compared
            if not damaged:
                say(restarts.after(error, start.step))
            failure = error
        finally:
            stragglers.write(folder)
        again = resume if damaged or not newest_first(folder.checkpoints) else "auto"
        used, compared = start.checkpoint, damaged
        start = prepare.plan_start(folder, config, cluster.ranks, again, 1, say, hashes=damaged)
        if damaged and start.checkpoint == used:
            say(f"warning: {failure}; the launcher finds no damage and tries once more")
