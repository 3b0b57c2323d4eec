"""A job: a config, and what commands and ranks derive from it, each made once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from engine.cluster.cluster import Cluster, nodes_of
from engine.cluster.hostfile import Node
from engine.cluster.mesh import Mesh
from engine.config.schema import Config
from engine.cost.model import Costs
from engine.planner.settings import PlanSettings


@dataclass(frozen=True)
class Job:
    """A config with its cluster, mesh, costs and planner's settings, which are made when they are first asked for.

    Derive further jobs with `with_config`, so that the hostfile is read only once. Properties raise
    ConfigError for a hostfile or a calibration that cannot be used, and if the mesh does not fit the cluster.
    """

    config: Config
    known_nodes: tuple[Node, ...] | None = None  # taken over from another job; None: those of the hostfile
    known_settings: PlanSettings | None = None  # also taken over, with their costs; None: those of the config

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes, with the speeds of the hostfile."""
        return nodes_of(self.config.cluster) if self.known_nodes is None else self.known_nodes

    @cached_property
    def cluster(self) -> Cluster:
        """The cluster, whose ranks are devices."""
        return Cluster.of(self.config.cluster, self.nodes)

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh of all devices."""
        return Mesh.of(self.cluster.ranks, self.config.parallel)

    @cached_property
    def costs(self) -> Costs:
        """The costs on the cluster, with the rates that the config names."""
        return Costs.of(self.config, self.cluster) if self.known_settings is None else self.known_settings.costs

    @cached_property
    def settings(self) -> PlanSettings:
        """The planner's settings."""
        known = self.known_settings
        return PlanSettings.of(self.config, self.cluster, self.costs) if known is None else known

    def with_config(self, config: Config) -> Job:
        """Return the job of a config with other values.

        It takes over the nodes if the hostfile and the size of the cluster are the same, and the costs and the
        planner's settings if only the capacity differs. In that case it makes the settings of this job if they have not
        been asked for, and raises their ConfigError.
        """
        old, new = self.config.cluster, config.cluster
        same = (old.hostfile, old.nodes, old.ranks_per_node) == (new.hostfile, new.nodes, new.ranks_per_node)
        only_capacity_differs = config.model_copy(update={"capacity": self.config.capacity}) == self.config
        settings = replace(self.settings, capacity=config.capacity) if only_capacity_differs else None
        return Job(config, self.nodes if same else None, settings)
