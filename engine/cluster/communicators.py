"""The process groups with a communicator: what engine/parallel creates, in this order, and what engine/cost counts.

Every rank creates groups of the same kinds in the same order, and the groups of a kind are a partition of all ranks.
NCCL requires it: each group is a split of the default group's communicator (in PyTorch, where that group is bound to a
device), and a split is a collective of all ranks. If one rank left a group out, the others would wait for it, or meet
it in its next split.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.cluster.mesh import Group, Mesh

# SMs for transfers that run beside attention, of 132 on an H100 or H200. flash-attn 3 leaves so many to them while a
# ring runs: its kernels keep their SMs until they end. NCCL takes one SM for each of its channels (CTAs), up to 32 for
# a peer, and those without a free SM would wait for the end of the kernel. 8 channels carry about 20 GB/s each, so the
# K,V of 8K tokens of an 8B model (33 MB) in .2 to .3 ms, while attention takes 2.3 ms. A guess, not measured.
TRANSFER_SMS = 8


@dataclass(frozen=True)
class Communicator:
    """A kind of group whose ranks have a communicator of their own.

    `urgent`: its kernels get a stream of high priority. At equal priority the GPU schedules the blocks of a kernel that
    runs already first, so that a transfer beside it would wait for its end. `sms`: the most SMs that NCCL uses for it;
    None for NCCL's choice.
    """

    group: Group
    urgent: bool = False
    sms: int | None = None


def communicators(mesh: Mesh, tied: bool) -> list[Communicator]:
    """List the communicators that every rank creates beside that of the default group, in this order.

    `tied`: whether embedding and head are one weight. A kind that has one rank in each group has no communicator, and
    neither has one whose groups are those of another kind: hdp and model are the default group where they are all
    ranks, model is tp or pp where the other has one rank, and the two stages of a pipeline share tied weights over pp.
    Rings have their own: their messages are in flight beside the gathers of ZeRO-3, the reductions of ZeRO-2 and 3, or
    other ranks' reductions.
    """
    kinds = (
        (mesh.hdp > 1, Communicator("rings", urgent=True, sms=TRANSFER_SMS)),
        # ZeRO-3 gathers the weights of the next layers from it while this layer is computed.
        (1 < mesh.hdp < mesh.ranks, Communicator("hdp", urgent=True)),
        # Nothing is computed while the results of these are awaited: they compete with no kernel, and may use all SMs.
        (mesh.tp > 1, Communicator("tp")),
        # Activations and gradients travel while other micro-batches are computed.
        (mesh.pp > 1, Communicator("pp", urgent=True, sms=TRANSFER_SMS)),
        (mesh.tp > 1 and mesh.pp > 1 and mesh.hdp > 1, Communicator("model")),
        (mesh.ep > 1, Communicator("ep")),
        (1 < mesh.ep < mesh.hdp, Communicator("experts")),
        (tied and mesh.pp > 2, Communicator("tied")),  # at the end of a step
    )
    return [one for made, one in kinds if made]
