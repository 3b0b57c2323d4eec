"""What a device's memory holds beside what is counted: stated, not computed."""

from __future__ import annotations

from dataclasses import dataclass

from engine.cluster.cluster import Cluster
from engine.config.schema import Config
from engine.cost.states import on_cpus

_CONTEXT = 1 << 30  # of a GPU: CUDA's context, libraries' handles and workspaces
_NCCL = 1 << 30  # of a GPU among others: the communicators' buffers
_FRAGMENTATION = 5  # percent of the tensors: gaps that PyTorch's allocator leaves with expandable segments
_PROCESS = 480 << 20  # of a rank on a CPU: Python, PyTorch and DeepSpeed, resident


@dataclass(frozen=True)
class Allowance:
    """Bytes of a device's runtime, and percent of its tensors that the allocator's gaps come to."""

    context: int
    percent: int

    @classmethod
    def of(cls, config: Config, devices: int | None = None) -> Allowance:
        """Return what one of so many devices, by default those of the cluster, takes: a GPU if its data sheet is
        known, else a process on a CPU."""
        if on_cpus(config):
            return cls(_PROCESS, 0)
        devices = devices or Cluster.of(config.cluster).ranks
        return cls(_CONTEXT + (_NCCL if devices > 1 else 0), _FRAGMENTATION)

    def usable(self, memory: int) -> int:
        """Return the bytes of tensors that fit a device: the most whose gaps and context fit beside them."""
        return max(0, memory - self.context) * 100 // (100 + self.percent)

    def fragmentation(self, tensors: int) -> int:
        """Return the gaps beside so many bytes of tensors."""
        return -(-tensors * self.percent // 100)
