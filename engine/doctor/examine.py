"""Runs all checks of the doctor: this machine, and the hosts of a hostfile. Imports no torch."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from engine.cluster.cluster import Cluster
from engine.cluster.hosts import is_local
from engine.config.devices import uses_gpus
from engine.config.schema import Config
from engine.data.cache import cache_folder
from engine.doctor import devices, hosts, libraries, limits, network, ranks, software, storage
from engine.doctor.check import Check, Checks, skipped
from engine.doctor.rank import PARTS
from engine.job import Job
from engine.launch.checks.launchable import check_launch
from engine.launch.checks.ready import Need, allow_many_files
from engine.remote.node import shared_memory

SECTIONS = ("software", "devices", "storage", "system", "network", "hosts")


def examine(job: Job, say: Callable[[str], None]) -> list[Check]:
    """Check whether a run of this job can work; return the results, in the order of SECTIONS.

    What fails because of another failure is skipped. Logs of ranks that fail stay in a temporary folder, which their
    check names. `say` gets a line before the checks begin. Raises ConfigError for a hostfile that is malformed, or that
    no launch can use.
    """
    config, cluster = job.config, job.cluster
    check_launch(job, launcher=None)
    say("checking; this takes about 10 s")
    checks, logs = Checks(), Path(tempfile.mkdtemp(prefix="bytescale-doctor-"))
    kept = False
    allow_many_files()  # as `train` does; before the check of the limit, which ranks of this machine inherit
    try:
        # The slow checks run at the same time, since they wait for other processes. Ranks need the main thread: only
        # there can their launcher handle signals.
        with ThreadPoolExecutor(2) as background:
            asked = background.submit(libraries.ask, config)
            looked = background.submit(hosts.look_at, job, logs / "hosts") if config.cluster.hostfile else None
            _network(checks, cluster, logs / "ranks")
            kept = any(check.name in PARTS and check.state == "failed" for check in checks.found)

            checks.add("software", "python", software.python)
            checks.add("software", "bytescale", lambda: software.bytescale(software.Software.here()))
            checks.add("software", "torch", lambda: devices.torch(asked.result()))
            checks.add("software", "deepspeed", lambda: devices.deepspeed(asked.result()))
            checks.add("software", "packages", software.packages)
            checks.add("software", "Ray", software.ray, config.data, len(cluster.nodes))

            checks.add("devices", "GPUs", lambda: devices.gpus(job, asked.result()))
            checks.add("devices", "CUDA driver", devices.driver)
            checks.add("devices", "NCCL", lambda: devices.nccl(job, asked.result()))
            checks.add("devices", "environment", devices.environment, config)
            checks.add("devices", "attention kernel", lambda: devices.kernel(asked.result()))

            _storage(checks, config)
            here = [node.devices for node in cluster.nodes if is_local(node.host)] or [0]
            objects = shared_memory(config.data)
            need = Need(max(here), cluster.ranks, len(cluster.nodes), uses_gpus(config), objects)
            for name, look in limits.CHECKS.items():
                checks.add("system", name, look, need)

            if looked is None:
                checks.add(
                    "hosts", "hosts", skipped, "hosts", "no hostfile is given; to check hosts, add --hostfile FILE"
                )
            else:
                checks.add("hosts", "hosts", looked.result)
    finally:
        if not kept:
            shutil.rmtree(logs)
    return sorted(checks.found, key=lambda check: SECTIONS.index(check.section))


def _network(checks: Checks, cluster: Cluster, place: Path) -> None:
    """Check the network of this machine; if it is not broken, let two ranks use it, with their files in `place`."""
    others = [node.address for node in cluster.nodes if not is_local(node.host)]
    checks.add("network", "host name", network.host_name, bool(others))
    connects = checks.add("network", "loopback", network.loopback)
    routes = checks.add("network", "interfaces", network.interfaces, os.environ, others)
    why = None if connects and routes else "the interfaces or connections above are broken"
    if find_spec("torch") is None:
        why = "torch is not installed"
    if why is None:
        place.mkdir()
        checks.add("network", "two ranks", ranks.two_ranks, place)
    for part in PARTS if why else ():
        checks.add("network", part, skipped, part, why or "")


def _storage(checks: Checks, config: Config) -> None:
    """Check the folders that the config names; if the run folder can be used, write checkpoints."""
    if checks.add("storage", "run folder", storage.run_folder, config):
        checks.add("storage", "checkpoint", storage.checkpoint, config)
    else:
        checks.add("storage", "checkpoint", skipped, "checkpoint", "the run folder cannot be used")
    checks.add("storage", "data cache", lambda: storage.data_cache(cache_folder(config.data)))
