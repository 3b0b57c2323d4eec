"""Runs the ranks until all steps are finished: starts them again from the last checkpoint after a failure.

Note: [damage found by ranks]. Ranks compare the hashes of the checkpoint, each a part: one process would take minutes.
Where they find damage, they end before they have changed anything, and the launcher compares the hashes itself: it
alone can choose another checkpoint, because metrics and ledger go back with it. Damage is rare, so this may be slow.
Ranks check the chosen checkpoint again; if they still find damage, the run ends.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine import interrupts
from engine.errors import BytescaleError, ExitCode
from engine.launch import prepare
from engine.launch.agents.launchers import Launcher, Starts
from engine.launch.agents.ranks import PreemptedError, run_ranks, stopped_on_request
from engine.launch.launch import Launch
from engine.launch.outcome import write_page
from engine.launch.restarts import Restart, Restarts
from engine.launch.say import OnStep
from engine.launch.stragglers import Stragglers
from engine.launch.tail import MetricsTail
from engine.run import launches
from engine.run.checkpoints import newest_first
from engine.run.folder import RunFolder


def supervise(launch: Launch, start: prepare.Start, resume: str, on_step: OnStep) -> prepare.Start:
    """Run the ranks from `start`; return the start from which they finished.

    `resume` is the user's choice; it counts until the run has saved a checkpoint. Raises PreemptedError if the run was
    asked to stop, PreflightError if a host cannot start its ranks, else the error of the first rank that failed, if no
    restart helps or is left.
    """
    config, cluster, folder, say = launch.job.config, launch.job.cluster, launch.folder, launch.say
    notice = config.run.notice_file
    restarts, compared = Restarts(config.run.restarts, folder), False
    launcher: Launcher = launch.joins or Starts()
    stragglers = Stragglers(cluster, launch.job.mesh, say)
    prepare.go_back(folder, start.step, say)
    while True:
        say(f"{folder.root}: {start.outlook(config)}")
        if not start.plans:
            return start
        commands = launch.commands(start.checkpoint)
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
            try:
                if not launcher.restarts:
                    raise
                # Note: [damage found by ranks]. Comparing all hashes does not use up a restart, but happens once only:
                # if ranks then still find damage, the run ends.
                damaged = error.code == ExitCode.NO_CHECKPOINT and start.checkpoint is not None and not compared
                restart = Restart("") if damaged else restarts.after(error, start.step)
            except BytescaleError:
                write_page(folder, say)
                raise
            failure = error
        finally:
            stragglers.write(folder)
        # No rank runs until the next start, so a request to stop ends the launcher itself.
        with requests_to_stop(folder):
            if restart.line:
                say(restart.line)
            time.sleep(restart.wait_s)
            # The run has now saved a checkpoint, which replaces the user's choice.
            if not damaged and newest_first(folder.checkpoints):
                resume = "auto"
            used, compared = start.checkpoint, damaged
            start = prepare.plan_start(launch, resume, 1, hashes=damaged)
            if damaged and start.checkpoint == used:
                say(f"warning: {failure}; the launcher finds no damage and retries")
            prepare.go_back(folder, start.step, say)


@contextmanager
def requests_to_stop(folder: RunFolder) -> Iterator[None]:
    """While no ranks run, a signal that asks the run to stop arrives as KeyboardInterrupt. It ends as in a start."""
    try:
        yield
    except BaseException as error:
        if not interrupts.is_interrupt(error):
            raise
        interrupts.answered()
        raise stopped_on_request(folder, bool(newest_first(folder.checkpoints))) from None
