"""Allowances for memory that is not in counted tensors: assumed constants, and the headroom of the config."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.cluster.cluster import Cluster
from engine.cluster.communicators import TRANSFER_SMS, communicators
from engine.cluster.mesh import Mesh
from engine.config.devices import uses_gpus
from engine.config.schema import PLANNERS, Config
from engine.tables import imported

_CONTEXT = 1 << 30  # of a GPU: CUDA context, handles and workspaces of libraries
# NCCL on a GPU, if there are several. A communicator has buffers for its collectives: 688 MiB were measured with four
# A100 (NVIDIA/nccl#964). The default group has one, and those that `communicators` lists.
_COMMUNICATOR = 688 << 20
# A peer in a ring, or a neighbouring stage, has buffers for each direction and channel: 4 MiB (NCCL_BUFFSIZE), with
# NVLink at the sender; 4.7 and .5 MiB of two other protocols at the receiver; each side a multiple of 2 MiB
# (p2pSendSetup, p2pRecvSetup in NCCL's src/transport/p2p.cc). That is 12 MiB in each channel. NCCL has up to 32 of them
# for a peer inside a node, but not more than the communicator's `max_ctas`, rounded up to a power of two
# (ncclTopoComputeP2pChannels in src/graph/paths.cc). Between nodes there are at most two channels a peer, so this is an
# upper bound, which also covers more peers on other nodes.
_PEER = TRANSFER_SMS * (12 << 20)
PEERS = 4  # of a rank in all of its rings, unless its planner needs more (planner/planners.py)
_PEERS_IN_TEAMS = 16  # in a pipeline, where rings have teams of up to four
_FRAGMENTATION = 5  # percent of the tensors on a GPU: PyTorch's allocator with expandable segments
# A rank of cluster=local is a process on a CPU. Before the first tensor, Python, PyTorch and DeepSpeed take 314 MiB.
# The C library keeps gaps between small blocks, none to 250 MiB (the allocator's settings: launch/agents/commands.py),
# and gloo copies what it sends. Both values together are what the fullest of the measured runs held
# (docs/decisions.md, Memory and offload).
_PROCESS = 520 << 20
_PROCESS_PERCENT = 8  # of the tensors


@dataclass(frozen=True)
class Allowance:
    """Bytes of the CUDA context or the process, the percentage that fragmentation adds to the tensors, and headroom."""

    context: int
    percent: int
    headroom: float  # fraction of the device's and of the host's memory that is left free

    @classmethod
    def of(cls, config: Config, cluster: Cluster, devices: int | None = None) -> Allowance:
        """The allowance of a device in a run on `devices` devices, by default all ranks of the cluster."""
        if not uses_gpus(config):
            return cls(_PROCESS, _PROCESS_PERCENT, config.cluster.headroom)
        devices = devices or cluster.ranks
        context = _CONTEXT + (_nccl(devices, cluster.largest_node, config) if devices > 1 else 0)
        return cls(context, _FRAGMENTATION, config.cluster.headroom)

    def free(self, memory: int) -> int:
        """Bytes of a device's or a host's `memory` that are left free."""
        return math.ceil(self.headroom * memory)

    def usable(self, memory: int) -> int:
        """Most bytes of tensors that fit on a device of `memory` bytes beside headroom, context and fragmentation."""
        return max(0, memory - self.free(memory) - self.context) * 100 // (100 + self.percent)

    def fragmentation(self, tensors: int) -> int:
        """Bytes that fragmentation adds to `tensors` bytes."""
        return -(-tensors * self.percent // 100)


def _nccl(devices: int, in_node: int, config: Config) -> int:
    """Bytes of NCCL's buffers on each of `devices` devices, of which a node has `in_node`."""
    mesh = Mesh.of(devices, config.parallel)
    made = 1 + len(communicators(mesh, config.model.tied))
    peers = min(max(PEERS, imported(PLANNERS)[config.planner.name].most_peers), mesh.hdp - 1)
    if mesh.pp > 1:
        peers = max(peers, min(_PEERS_IN_TEAMS, mesh.hdp - 1, in_node // mesh.tp - 1))
    stages = min(2, mesh.pp - 1)
    return made * _COMMUNICATOR + (max(0, peers) + stages) * _PEER
