"""The process of one rank: joins the process groups, trains, and reports an error.

After an error, the exit code is the kind of error, and the cause is written to `RUN/logs/rank-N.error.json`, which the
agent of its node reads. The agent may ask the rank to stop. If the agent is gone, the rank exits immediately.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from engine.config.devices import uses_gpus
from engine.control import progress
from engine.control.chaos import Chaos
from engine.control.control import Control
from engine.control.link import Link
from engine.errors import BytescaleError, ExitCode, HostError, Problem, broken_gpu, memory_error, storage_error
from engine.files import write_json
from engine.run.cause import Cause
from engine.run.folder import RunFolder

if TYPE_CHECKING:
    from engine.config.schema import Config

# Errors of torch.distributed when another rank, or the network to it, is gone. gloo raises a plain RuntimeError.
_LOST_TYPES = ("DistNetworkError", "DistBackendError")
_LOST_SIGNS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer")


def main(arguments: list[str]) -> int:
    """Train as one rank, with the command-line arguments RUN [CHECKPOINT]. Returns the exit code."""
    folder = RunFolder(Path(arguments[0]))
    checkpoint = Path(arguments[1]) if len(arguments) > 1 else None

    def work(stop: Callable[[], bool], control: Control) -> int:
        # Imported here, so that the rank already listens to its launcher, and a failed import is reported.
        from engine.config.load import read_resolved

        config = read_resolved(folder.resolved)
        if os.environ["LOCAL_RANK"] == "0":
            _check_documents(folder, config, control.rank)  # before the imports, which take seconds
        with importing():
            from engine.job import Job
            from engine.parallel.groups import close_listeners, join_groups
            from engine.selection import selected
            from engine.trainer.alike import card, check_alike, class_of, versions
            from engine.trainer.loop import Trainer

        progress.report("start")
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
        if config.run.chaos:
            progress.allow_chaos(Chaos(folder.chaos, int(os.environ["RANK"])).reach)
        notice = Path(config.run.notice_file) if config.run.notice_file else None
        # Before NCCL connects: other versions of it do not understand each other.
        job, gpus = Job(config), uses_gpus(config)
        check_alike(control, versions(gpus))
        kind, kinds = class_of(job, control.rank)
        if gpus:
            check_alike(control, card(int(os.environ["LOCAL_RANK"])), kind, kinds)
        groups = join_groups(config, control)
        trainer = Trainer(folder, config, groups, config.run.weights if checkpoint is None else None)
        stage = groups.mesh.place(groups.rank).pp
        check_alike(control, selected(), stage * kinds + kind, groups.mesh.pp * kinds)
        if checkpoint is not None:
            trainer.verify(checkpoint)
        trainer.begin(checkpoint)
        if groups.device.type == "cpu":  # NCCL also connects later, and there are no gloo groups beside it
            close_listeners()  # all groups are made
        code = trainer.run(lambda: stop() or (notice is not None and notice.exists()))
        trainer.close()  # not after an error: it would wait for ranks that may be gone, and delay the report
        return code

    return run_rank(folder, work)


def _check_documents(folder: RunFolder, config: Config, rank: int) -> None:
    """Look at the files of the documents on this host, if the run has several. Raises DataError as `check_files`."""
    from engine.data.host_files import check_files
    from engine.job import Job

    cluster = Job(config).cluster
    if len(cluster.nodes) > 1:
        node, _ = cluster.place(rank)
        check_files(folder.files, cluster.nodes[node].host)


@contextmanager
def importing() -> Iterator[None]:
    """Import libraries without garbage collection, and exclude their objects from later collections.

    Collections take a fourth of the imports' processor time, and almost none of the objects ever become garbage. Later
    collections would visit them again, and DeepSpeed starts several when it creates an engine. PyTorch's compiler is
    imported here too; otherwise creating an optimizer would import it later, with collection on.
    """
    gc.disable()
    try:
        import torch._dynamo  # noqa: F401

        yield
    finally:
        gc.freeze()
        gc.enable()


def run_rank(folder: RunFolder, work: Callable[[Callable[[], bool], Control], int], saves: bool = True) -> int:
    """Run `work` as the rank RANK of the environment. Returns its exit code, or that of the error it raised.

    An error is also written to the run folder. `work` gets a function that returns whether the rank was asked to stop,
    and its link to the agent. If `saves` is false, `work` saves nothing, and the process exits immediately when it is
    asked to stop.
    """
    # DeepSpeed's autotuner imports MLflow if it is installed: 1 s and 60 MB of each rank, for nothing. With None, the
    # import fails as if it were not installed.
    sys.modules["mlflow"] = None  # type: ignore[assignment]
    rank = int(os.environ["RANK"])
    asked = False

    def ask() -> None:
        # A plain flag: Event.set takes a lock, for which a second signal would wait inside the first one's handler.
        nonlocal asked
        asked = True
        if not saves:
            os._exit(ExitCode.PREEMPTED)

    control = Control(rank, Link.to_agent(), ask)
    progress.report_to(control.agent)
    faulthandler.register(signal.SIGUSR2)  # the agent sends it if no rank makes progress: stacks go to the log
    for number in (signal.SIGTERM, signal.SIGUSR1):  # schedulers may send them to all processes of a job
        signal.signal(number, lambda *_: ask())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles Ctrl-C
    try:
        return work(lambda: asked, control)
    except BaseException as error:
        cause = replace(explain(error), time=time.time())
        # If the disk is full, both may fail; the exit code still reports the kind of error.
        with suppress(OSError):
            traceback.print_exc()
        with suppress(OSError):
            write_json(folder.error(rank), cause.to_json())
        return int(cause.code)


def leave(code: int) -> NoReturn:
    """End this process with an exit code, at once.

    A regular exit would wait for the planning process to finish its plan, and delay the cause of an error. Threads of
    NCCL would still ask the store of the process groups, which is in Python, while the interpreter ends.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def explain(error: BaseException) -> Cause:
    """Return why a rank fails that raises an error, in one sentence."""
    known = error if isinstance(error, BytescaleError) else storage_error(error) or memory_error(error)
    if known is not None:
        return Cause(known.code, known.problems[0], whole=isinstance(known, HostError))
    if any(sign in str(error) for sign in ("PytorchStreamWriter", "inline_container")):  # torch.save hides the OSError
        return Cause(ExitCode.STORAGE, Problem("storage failed while a checkpoint was written"))
    rank, gpu = os.environ.get("RANK", "0"), os.environ.get("LOCAL_RANK", "0")
    if broken := broken_gpu(str(error), f"GPU {gpu} of {socket.gethostname()} (rank {rank})"):
        return Cause(ExitCode.PREFLIGHT, broken, whole=True, hardware=True)
    text = str(error).strip().splitlines()
    lost = isinstance(error, ConnectionError) or type(error).__name__ in _LOST_TYPES
    if lost or any(sign in str(error) for sign in _LOST_SIGNS):
        said = text[0] if text else type(error).__name__
        said = said.rpartition(".cc:")[2].partition("] ")[2] or said  # gloo's own file and line
        what = f"lost its connection to another rank: {said.partition('. This is typically')[0]}"
        hint = "check the network between the hosts; then resume the run"
        return Cause(ExitCode.HANG, Problem(what, hint=hint))
    return Cause(ExitCode.BUG, Problem(f"{type(error).__name__}: {text[0] if text else ''}"))
