"""The runtimes that `data.runtime` may name. Their modules are imported when one is opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from engine.tables import lazy

if TYPE_CHECKING:
    from engine.control.control import Control
    from engine.data.runtime.runtime import DataRuntime
    from engine.job import Job
    from engine.run.folder import RunFolder


class OpenRuntime(Protocol):
    """Opens a runtime for a rank.

    `control` is its link to its agent, and `sockets` are its NODE_SOCKETS. The `first` rank of a node starts the
    processes that a node has once. All ranks must open theirs together.
    """

    def __call__(
        self, folder: RunFolder, job: Job, control: Control, sockets: Sequence[int], first: bool
    ) -> DataRuntime: ...


RUNTIMES: Mapping[str, OpenRuntime] = {
    "local": lazy("engine.data.runtime.local:LocalRuntime"),
    "ray": lazy("engine.remote.bridge:RayRuntime"),
}
