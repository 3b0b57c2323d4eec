"""Names ranks that are slower than the others, and keeps the speeds of hosts for `cluster.speeds=measured`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median_low

from engine.cluster.cluster import Cluster
from engine.cluster.mesh import Mesh
from engine.errors import ConfigError
from engine.files import write_json
from engine.job import Job
from engine.launch.say import Say
from engine.readers import read_object
from engine.run.folder import RunFolder

_SLOW = 1.3  # times as long as other ranks
_STEP = 5  # percent: speeds are rounded, since measured ones differ by a few percent


class Stragglers:
    """The paces of the ranks of a run (engine/trainer/pace.py).

    Ranks are compared within their pipeline stage, because how wrong the planned times are depends on the stage. A host
    with a speed of 50 % in the hostfile may take twice as long as others without being called slow.
    """

    def __init__(self, cluster: Cluster, mesh: Mesh, say: Say) -> None:
        """`cluster` has the devices as ranks, which `mesh` divides into stages."""
        self._cluster, self._say = cluster, say
        self._stages = [mesh.place(rank).pp for rank in range(cluster.ranks)]
        # The devices of a tp group wait for the slowest of them.
        self._planned = [min(int(cluster.speed[i]) for i in mesh.members(rank, "tp")) for rank in range(cluster.ranks)]
        self._paces = dict[int, float]()
        self._noted, self._named = 0, set[int]()

    def note(self, rank: int, pace: float) -> None:
        """Note a rank's pace. When all ranks have reported theirs, say once of each whether it is slow."""
        self._paces[rank] = pace
        self._noted += 1
        if self._noted % self._cluster.ranks or len(self._paces) < self._cluster.ranks:
            return
        hint = "; at the next start, cluster.speeds=measured gives this host less to do"
        took = {rank: pace * self._planned[rank] for rank, pace in self._paces.items()}  # against the planned speed
        usual = self._of_stages(median_low, took)
        for slow in sorted(took):
            times = took[slow] / usual[self._stages[slow]]
            if times >= _SLOW and slow not in self._named:
                self._named.add(slow)
                slower = f"rank {slow} on {self._host(slow)} takes {times:.1f} times as long as others"
                self._say(f"warning: {slower}{hint if len(self._cluster.nodes) > 1 else ''}")

    def _of_stages(self, reduce: Callable[[list[float]], float], values: dict[int, float]) -> list[float]:
        """Reduce the values of the ranks of each stage to one."""
        of_stage: list[list[float]] = [[] for _ in range(max(self._stages) + 1)]
        for rank, value in values.items():
            of_stage[self._stages[rank]].append(value)
        return [reduce(of_one) for of_one in of_stage]

    def speeds(self) -> dict[str, int]:
        """Return the speed of each host in percent of the fastest; empty until all ranks have reported their pace.

        A rank is compared with the fastest of its stage. A host is as fast as its slowest rank, for which the others
        wait.
        """
        if len(self._paces) < self._cluster.ranks:
            return {}
        best = self._of_stages(min, self._paces)
        slowest: dict[str, float] = {}
        for rank, pace in self._paces.items():
            speed = best[self._stages[rank]] / pace
            slowest[self._host(rank)] = min(speed, slowest.get(self._host(rank), speed))
        fastest = max(slowest.values())
        return {host: max(_STEP, _STEP * round(100 / _STEP * speed / fastest)) for host, speed in slowest.items()}

    def _host(self, rank: int) -> str:
        return self._cluster.nodes[int(self._cluster.node_of[rank])].host

    def write(self, folder: RunFolder) -> None:
        """Write the speeds of the hosts to RUN/speeds.json, if they are known. A failure does not fail the run."""
        if speeds := self.speeds():
            with suppress(OSError):
                write_json(folder.speeds, speeds)


def with_speeds(job: Job, say: Say) -> Job:
    """Return the job with the speeds that its run has measured, as a list, if cluster.speeds=measured.

    They become part of the run's config, so all ranks plan with the same ones. The job has the hosts under the names
    that `Stragglers` gets. Raises ConfigError if speeds.json is damaged.
    """
    config, nodes = job.config, job.cluster.nodes
    if config.cluster.speeds != "measured":
        return job
    path = RunFolder(Path(config.run.out)).speeds
    try:
        found = read_object(path, error=ConfigError)
        speeds = tuple(max(1, min(100, int(found.get(node.host, node.speed)))) for node in nodes)
    except FileNotFoundError:
        say(f"cluster.speeds=measured: there is no {path} yet; planning with the speeds of the hostfile")
        return job
    except (ConfigError, ValueError, TypeError) as error:
        message, hint = f"{path} is damaged", "remove it, or set cluster.speeds=hostfile"
        raise ConfigError(message, key="cluster.speeds=measured", hint=hint) from error
    slower = [f"{node.host} {speed}%" for node, speed in zip(nodes, speeds, strict=True) if speed < 100]
    shown = f"{', '.join(slower[:3])}{' and others' if len(slower) > 3 else ''}" if slower else "all 100%"
    say(f"cluster.speeds=measured: {shown}")
    return job.with_config(config.model_copy(update={"cluster": config.cluster.model_copy(update={"speeds": speeds})}))
