"""What a launch is made of: the job, its run folder, who listens, and who has started the processes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from engine.job import Job
from engine.launch.agents.commands import NodeCommand, node_commands
from engine.launch.agents.environment import Forwarded, forwarded
from engine.launch.say import Say
from engine.launch.schedulers.join import Joins
from engine.run.folder import RunFolder


@dataclass(frozen=True)
class Launch:
    """A launch, from its checks to the end of the run: all starts of its ranks have the same job."""

    job: Job
    say: Say
    joins: Joins | None = None  # if a scheduler has started the processes of the other nodes

    @cached_property
    def folder(self) -> RunFolder:
        """The run folder."""
        return RunFolder(Path(self.job.config.run.out))

    def commands(self, checkpoint: Path | None, limit: int | None = None) -> list[NodeCommand]:
        """Build the commands that start the agents of all nodes, or of the first `limit`, from a checkpoint."""
        joined_at = self.joins.address if self.joins else None
        return node_commands(self.job, self.folder, checkpoint, limit, joined_at=joined_at)

    def forwarded(self) -> Forwarded:
        """Choose the variables that ranks on other hosts get from this environment. Nodes that join have their own."""
        return Forwarded({}, [], []) if self.joins else forwarded(os.environ, self.job.cluster)
