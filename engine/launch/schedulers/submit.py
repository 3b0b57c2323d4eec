"""Hands a run over to Slurm or Kubernetes: checks the config here, and writes what starts the run there."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine.config.schema import Config
from engine.config.units import counted
from engine.errors import ConfigError, RunFolderError
from engine.files import write_durably
from engine.fit.check import check_fit
from engine.job import Job
from engine.launch.checks.launchable import check_launch
from engine.launch.checks.place import check_place
from engine.launch.schedulers import k8s, slurm
from engine.run.folder import RunFolder


def hand_over(
    config: Config, launcher: str, words: Sequence[str], resume: str, dry_run: bool, say: Callable[[str], None]
) -> dict[str, Any]:
    """Submit a run to Slurm, or write the manifest for Kubernetes; return what the command prints as JSON.

    `launcher` is `slurm` or `k8s`; `words` are those of the command line, without the launcher. A dry run writes and
    submits nothing. Raises BytescaleError for a config that cannot be trained; this machine's GPUs are not looked at.
    """
    folder = RunFolder(Path(config.run.out))
    if config.cluster.hostfile is not None:
        key = f"cluster.hostfile={config.cluster.hostfile}"
        raise ConfigError("the hosts are chosen by the cluster", key=key, hint="leave it out and set cluster.nodes")
    # Checked before the job waits in a queue.
    job = Job(config)
    check_launch(job, None)
    check_fit(job, {"cluster.nodes"})
    if launcher == "k8s" and resume == "never":
        hint = "choose a new run.out instead"
        raise ConfigError("would begin again whenever a pod starts", key="--resume never", hint=hint)
    text = slurm.script(config, folder, words) if launcher == "slurm" else k8s.manifest(config, words)
    if dry_run:
        return {"dry_run": {"launcher": launcher, "nodes": config.cluster.nodes, "script": text}}
    # A dry run writes nothing, so the folder is checked only now.
    check_place(folder, config)
    path = folder.script if launcher == "slurm" else folder.manifest
    try:
        folder.logs.mkdir(parents=True, exist_ok=True)  # Slurm writes no log if the folder is missing
        write_durably(path, text.encode())
    except OSError as error:
        message, hint = f"cannot write the run folder: {error.strerror}", "choose another folder with run.out=DIR"
        raise RunFolderError(message, key=str(folder.root), hint=hint) from error
    if launcher == "k8s":
        say(f"{path}: {counted(config.cluster.nodes, 'pod')}; {k8s.how_to_apply(path)}")
        return {"k8s": {"manifest": str(path), "text": text}}
    number = slurm.submit(text, path)
    log = folder.logs / f"slurm-{number}.log"
    root, quoted = shlex.quote(str(folder.root)), shlex.quote(str(log))
    say(f"job {number} on {counted(config.cluster.nodes, 'node')}: `squeue -j {number}`, `scancel {number}`")
    say(f"follow it with `tail -F {quoted}` or `bytescale runs status {root}`")
    return {"slurm": {"job": number, "script": str(path), "log": str(log)}}
