"""Names ranks that are slower than the others, and keeps the speeds of hosts for `cluster.speeds=measured`."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from statistics import median_low

from engine.cluster.cluster import Cluster
from engine.cluster.mesh import Mesh
from engine.config.schema import Config
from engine.errors import ConfigError
from engine.files import write_json
from engine.launch.say import Say
from engine.run.folder import RunFolder

_SLOW = 1.3  # times as long as other ranks
_STEP = 5  # percent: speeds are rounded, since measured ones differ by a few percent


class Stragglers:
    """The paces of the ranks of a run (engine/trainer/pace.py).

    A rank is compared with those of its pipeline stage: how wrong the planned times are depends on the stage.
    """

    def __init__(self, cluster: Cluster, mesh: Mesh, say: Say) -> None:
        """`cluster` has the devices as ranks, which `mesh` divides into stages."""
        self._cluster, self._say = cluster, say
        self._stages = [mesh.place(rank).pp for rank in range(cluster.ranks)]
        self._paces = dict[int, float]()
        self._noted, self._named = 0, set[int]()

    def note(self, rank: int, pace: float) -> None:
        """Note a rank's pace. When all ranks have reported theirs, say once of each whether it is slow."""
        self._paces[rank] = pace
        self._noted += 1
        if self._noted % self._cluster.ranks or len(self._paces) < self._cluster.ranks:
            return
        hint = "; at the next start, cluster.speeds=measured gives this host less to do"
        for slow, times in self._relative().items():
            if times >= _SLOW and slow not in self._named:
                self._named.add(slow)
                slower = f"rank {slow} on {self._host(slow)} takes {times:.1f} times as long as others"
                self._say(f"warning: {slower}{hint if len(self._cluster.nodes) > 1 else ''}")

    def _relative(self) -> dict[int, float]:
        """Return each rank's pace divided by the median of its stage."""
        of_stage: dict[int, list[float]] = {}
        for rank, pace in self._paces.items():
            of_stage.setdefault(self._stages[rank], []).append(pace)
        usual = {stage: median_low(paces) for stage, paces in of_stage.items()}
        return {rank: pace / usual[self._stages[rank]] for rank, pace in self._paces.items()}

    def speeds(self) -> dict[str, int]:
        """Return the speed of each host in percent of the fastest; empty until all ranks have reported their pace.

        A host is as fast as its slowest rank, for which the others wait.
        """
        if len(self._paces) < self._cluster.ranks:
            return {}
        slowest: dict[str, float] = {}
        for rank, times in self._relative().items():
            speed = int(self._cluster.speed[rank]) / times
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


def with_speeds(config: Config, cluster: Cluster, say: Say) -> Config:
    """Return the config with the speeds that its run has measured, as a list, if cluster.speeds=measured.

    They become part of the run's config, so all ranks plan with the same ones. `cluster` has the hosts under the names
    that `Stragglers` gets. Raises ConfigError if speeds.json is damaged.
    """
    if config.cluster.speeds != "measured":
        return config
    path = RunFolder(Path(config.run.out)).speeds
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        speeds = tuple(max(1, min(100, int(found.get(node.host, node.speed)))) for node in cluster.nodes)
    except FileNotFoundError:
        say(f"cluster.speeds=measured: there is no {path} yet; planning with the speeds of the hostfile")
        return config
    except (ValueError, TypeError, AttributeError) as error:
        message, hint = f"{path} is damaged", "remove it, or set cluster.speeds=hostfile"
        raise ConfigError(message, key="cluster.speeds=measured", hint=hint) from error
    slower = [f"{node.host} {speed}%" for node, speed in zip(cluster.nodes, speeds, strict=True) if speed < 100]
    shown = f"{', '.join(slower[:3])}{' and others' if len(slower) > 3 else ''}" if slower else "all 100%"
    say(f"cluster.speeds=measured: {shown}")
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"speeds": speeds})})
