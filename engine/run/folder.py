"""The run folder, in which the launcher, the ranks and the report exchange files. Does not import torch."""

from __future__ import annotations

import errno
import os
import shlex
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from engine.errors import RunFolderError

_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)


class RunFolder:
    """The paths of the files and folders in the run folder `root`. Nothing is created."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.resolved = root / "resolved.yaml"  # the complete config
        self.summary = root / "summary.json"  # facts of the documents and the model
        self.blocks = root / "blocks.jsonl"  # the blocks of all sources of texts (engine/data/block_files.py)
        self.files = root / "files.jsonl"  # of those blocks, if there are several hosts (engine/data/host_files.py)
        self.metrics = root / "metrics.jsonl"  # one JSON object per step
        self.launches = root / "launches.jsonl"  # when, where and with what ranks were started (engine/run/launches.py)
        self.ledger = root / "ledger"  # the documents of each step (engine/data/ledger.py)
        self.quarantine = root / "quarantine.jsonl"  # documents that were left out (engine/data/quarantine.py)
        self.plane_events = root / "data"  # of the data plane (engine/data/runtime/events.py)
        self.plan = root / "plan.bin"  # of one step, with its measured spans in `trace`
        self.trace = root / "trace.json"
        self.report = root / "report.html"
        self.script = root / "slurm.sh"  # of `--launcher slurm`
        self.manifest = root / "k8s.yaml"  # of `--launcher k8s`
        self.checkpoints = root / "checkpoints"  # step-00000100, ...
        self.logs = root / "logs"
        self.trackers = root / "trackers"  # what TensorBoard, Weights & Biases and MLflow write
        self.speeds = root / "speeds.json"  # measured, of each host, in percent of the fastest
        self.chaos = root / "chaos"  # planted faults, if run.chaos=true (engine/control/chaos.py)

    def log(self, rank: int) -> Path:
        """The file with everything that a rank prints."""
        return self.logs / f"rank-{rank}.log"

    def node_log(self, number: int) -> Path:
        """The file with everything that the agent of a node, or ssh, prints on its standard error."""
        return self.logs / f"node-{number}.log"

    def data_log(self, name: str) -> Path:
        """The file with everything that a process of the data plane on Ray prints."""
        return self.logs / f"data-{name}.log"

    def launch(self, key: str) -> Path:
        """The file through which the other processes of a launch find its launcher (launch/schedulers/join.py)."""
        return self.logs / f"launch-{key}.json"

    def tracker_log(self, name: str) -> Path:
        """The file with everything that a tracker's library prints."""
        return self.logs / f"tracker-{name}.log"

    def tracker(self, name: str) -> Path:
        """The JSON file with the id that a tracker gave the run, and the last step that it has."""
        return self.trackers / f"{name}.json"

    def nccl_record(self, rank: int) -> Path:
        """The file with a rank's last operations of NCCL (engine/run/flight_recorder.py)."""
        return self.logs / f"nccl-rank-{rank}"

    def error(self, rank: int) -> Path:
        """The JSON file in which a rank writes why it failed."""
        return self.logs / f"rank-{rank}.error.json"


class Held:
    """Notices when a run folder is moved or removed while a process uses it."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._handle = os.open(folder.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._handle)

    def check(self) -> None:
        """Raise RunFolderError, which names the place of the checkpoints, unless the folder is still in its place."""
        root = self._folder.root
        try:
            here = os.path.samestat(os.fstat(self._handle), root.stat())
        except (FileNotFoundError, NotADirectoryError):
            here = False
        if here and self._folder.resolved.exists() and self._folder.checkpoints.is_dir():
            return
        # The kernel knows the new path, and adds this to that of a folder that was removed.
        now = Path(f"/proc/self/fd/{self._handle}").readlink()
        where, saved = RunFolder(now).checkpoints, list[str]()
        with suppress(OSError):
            saved = sorted(path.name for path in where.iterdir() if path.name.startswith("step-"))
        kept = f"its newest checkpoint is {where / saved[-1]}" if saved else "it has no checkpoint there"
        if here:
            message, hint = "has lost files while the run was using it", kept
        elif now.name.endswith(" (deleted)") or now == root.absolute():
            message, hint = (
                "was removed while the run was using it",
                "its checkpoints are lost unless copies exist",
            )
        else:
            message = f"was moved to {now} while the run was using it"
            hint = f"move it back and resume it with --resume {shlex.quote(str(root))}; {kept}"
        raise RunFolderError(message, key=str(root), hint=hint)


@contextmanager
def held(folder: RunFolder) -> Iterator[None]:
    """Raise RunFolderError in place of any other error, and at the end, if the folder is moved or removed inside."""
    hold = Held(folder)
    try:
        yield
    except Exception as error:
        try:
            hold.check()
        except RunFolderError as moved:
            raise moved from error
        raise
    hold.check()


@contextmanager
def changing(run: Path) -> Iterator[None]:
    """Raise RunFolderError, which names the run folder `run`, for an OSError by which it cannot be written to."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        others = "belongs to another user and " if run.stat().st_uid != os.geteuid() else ""
        hint = f"`namei -l {shlex.quote(str(run))}` shows its owner and permissions"
        raise RunFolderError(f"{others}is not writable", key=str(run), hint=hint) from error
