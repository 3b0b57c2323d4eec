"""What is proved of every plan of every planner before any rank starts: rules 1 to 7, each a function.

Rule 0 is that the arrays are well-formed, so that the others may read them; so rules are tried in order and the first
broken one is reported. Why they suffice: a rank blocks only in its rings. By rules 3 and 4 some order of gangs agrees
with every rank, so the first unfinished gang has all its members at it; by rules 3 and 6 these members post the same
messages in the same order between each two of them, round by round, so it finishes. Then the next one does.
Letters: S sequences, P ranks, K shards, M micro-batches (plan.py).
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from engine.errors import PlanError
from engine.planner import loads
from engine.planner.gangs import components
from engine.planner.order import gang_order
from engine.planner.plan import Ints, StepPlan
from engine.planner.rows import out_of_range, short_row
from engine.planner.settings import PlanSettings

_MODES = ("free", "lockstep", "pipeline")


def verify(plan: StepPlan, settings: PlanSettings) -> None:
    """Raise PlanError with the number of the first rule that `plan` breaks, naming the sequence, rank or gang."""
    rule_0_well_formed(plan, settings)
    rule_1_every_token_once(plan)
    rule_2_memory(plan, settings)
    rule_3_rings_and_gangs(plan)
    rule_4_no_deadlock(plan)
    rule_5_slots(plan)
    rule_6_messages(plan)
    rule_7_peers(plan, settings.max_peers)


def rule_0_well_formed(plan: StepPlan, settings: PlanSettings) -> None:
    """The plan is for these settings; rows are complete, numbers in range; no rank and no ring is empty."""
    if plan.mode not in _MODES:
        raise PlanError(0, f"the plan's mode is {plan.mode}")
    for name in ("mode", "ranks", "capacity", "stages"):
        got, asked = getattr(plan, name), getattr(settings, name)
        if got != asked:
            raise PlanError(0, f"the plan's {name} is {got}, not {asked}")
    for name, array in plan.arrays().items():
        if array.ndim != 1 or array.dtype != np.int64:
            raise PlanError(0, f"{name} is not a row of 64-bit integers")
    sequences, shards, micro_batches = len(plan.lengths), len(plan.ring_ranks), len(plan.gang)
    if sequences == 0:
        raise PlanError(0, "the plan has no sequence")
    _rows("ring_start", plan.ring_start, rows=sequences, end=shards, least=1)
    _rows("micro_start", plan.micro_start, rows=plan.ranks, end=micro_batches, least=1)
    _rows("shard_start", plan.shard_start, rows=micro_batches, end=shards, least=0)
    _in_range("lengths", plan.lengths, sequences, 1, 2**62)
    _in_range("ring_ranks", plan.ring_ranks, shards, 0, plan.ranks)
    _in_range("shard_order", plan.shard_order, shards, 0, shards)
    _in_range("gang", plan.gang, micro_batches, 0, micro_batches)
    _in_range("slot", plan.slot, micro_batches, -1, micro_batches)
    _in_range("offload", plan.offload, micro_batches, 0, settings.offload + 1)


def rule_1_every_token_once(plan: StepPlan) -> None:
    """Every token of every sequence is on exactly one rank.

    The shards of a sequence are cut by rule (schedule.chunk_bounds), so each shard's being in one micro-batch of its
    rank is all that is left to show.
    """
    held = np.bincount(plan.shard_order, minlength=len(plan.shard_order))
    shard = _first(held != 1)
    if shard is not None:
        sequence = int(plan.shard_sequence[shard])
        raise PlanError(1, f"shard {shard} of sequence {sequence} is in {held[shard]} micro-batches, not in one")
    runs = plan.micro_rank[plan.shard_micro]
    shard = _first(runs != plan.ring_ranks)
    if shard is not None:
        sequence, rank, ring = int(plan.shard_sequence[shard]), int(runs[shard]), int(plan.ring_ranks[shard])
        raise PlanError(1, f"rank {rank} runs the shard of sequence {sequence} that its ring puts on rank {ring}")


def rule_2_memory(plan: StepPlan, settings: PlanSettings) -> None:
    """Each micro-batch keeps to its rank's capacity, its peak bytes fit the device, and what it offloads the host.

    With offload the capacity bounds the tokens whose activations stay (equation 3); the peak counts all of them.
    """
    costs = settings.costs
    tokens, buffers = loads.micro_loads(plan)
    resident = costs.resident(tokens, plan.offload) if plan.offload.any() else tokens
    micro = _first(resident > settings.capacities[plan.micro_rank])
    if micro is not None:
        rank = int(plan.micro_rank[micro])
        most = settings.capacities[rank]
        raise PlanError(2, f"rank {rank} holds {resident[micro]} tokens in micro-batch {micro}, above {most}")
    peak = costs.peak_bytes(tokens, buffers, plan.offload)
    micro = _first(peak > settings.cluster.memory[plan.micro_rank])
    if micro is not None:
        rank = int(plan.micro_rank[micro])
        memory = settings.cluster.memory[rank]
        raise PlanError(2, f"rank {rank} needs {peak[micro]} bytes in micro-batch {micro}, above {memory}")
    host = costs.token_bytes * (tokens - resident)
    micro = _first(host > settings.host_memory)
    if micro is not None:
        rank = int(plan.micro_rank[micro])
        message = f"rank {rank} offloads {host[micro]} bytes in micro-batch {micro}, above {settings.host_memory}"
        raise PlanError(2, message)


def rule_3_rings_and_gangs(plan: StepPlan) -> None:
    """A ring has distinct members; a gang is just what rings connect, with at most one micro-batch a rank.

    On a ring's order its members agree because there is one list of them.
    """
    shard = _first_twice(plan.ring_ranks, plan.shard_sequence, plan.ranks)
    if shard >= 0:
        sequence, rank = int(plan.shard_sequence[shard]), int(plan.ring_ranks[shard])
        raise PlanError(3, f"rank {rank} is twice in the ring of sequence {sequence}")
    label = components(plan.shard_micro, plan.ring_start, plan.micro_batches)
    micro = _first(plan.gang != plan.gang[label])
    if micro is not None:
        raise PlanError(3, f"micro-batches {label[micro]} and {micro} share rings but are not in one gang")
    roots = plan.gang[label == np.arange(plan.micro_batches)]
    unconnected = _first(np.bincount(roots) > 1)
    if unconnected is not None:
        raise PlanError(3, f"gang {unconnected} has micro-batches that no rings connect")
    micro_ = _first_twice(plan.gang, plan.micro_rank, int(plan.gang.max()) + 1)
    if micro_ >= 0:
        rank, gang = int(plan.micro_rank[micro_]), int(plan.gang[micro_])
        raise PlanError(3, f"rank {rank} has two micro-batches in gang {gang}")


def rule_4_no_deadlock(plan: StepPlan) -> None:
    """The graph of the gangs' passes, with the edges of each rank's actual execution order, has no cycle."""
    gang_order(plan)


def rule_5_slots(plan: StepPlan) -> None:
    """In lockstep mode all ranks have the same slots, in order, and a gang sits in one. In free mode there are none."""
    if plan.mode != "lockstep":
        micro = _first(plan.slot != -1)
        if micro is not None:
            raise PlanError(5, f"micro-batch {micro} has slot {plan.slot[micro]} in {plan.mode} mode")
        return
    counts = np.diff(plan.micro_start)
    rank = _first(counts != counts[0])
    if rank is not None:
        raise PlanError(5, f"rank {rank} has {counts[rank]} slots, rank 0 has {counts[0]}")
    micro = _first(plan.slot != np.tile(np.arange(counts[0]), plan.ranks))
    if micro is not None:
        raise PlanError(5, f"rank {plan.micro_rank[micro]} has slot {plan.slot[micro]} out of its order")
    _, first, gang = np.unique(plan.gang, return_index=True, return_inverse=True)
    micro = _first(plan.slot != plan.slot[first][gang])
    if micro is not None:
        raise PlanError(5, f"gang {plan.gang[micro]} sits in more than one slot")


def rule_6_messages(plan: StepPlan) -> None:
    """Every send has its receive, and each two ranks post their messages to each other in the same order.

    In a round of a direction of a layer every part of a ring sends one buffer of each kind to the next part, which
    receives just that one (schedule.transfers; tests/planner/test_schedule.py proves it for every degree it tries). The
    members walk through layers, directions and rounds alike. So between two ranks all messages pair up in order if the
    rings by which the first sends to the second come in the same order on both: the order of micro-batches on a rank,
    then of shards in a micro-batch.
    """
    shard = _first_out_of_order(plan.ring_start, plan.ring_ranks, plan.shard_order, plan.ranks)
    if shard >= 0:
        sequence = int(plan.shard_sequence[shard])
        target = int(loads.neighbours(plan)[0][shard])
        message = f"rank {plan.ring_ranks[shard]} sends sequence {sequence} out of the order of rank {target}"
        raise PlanError(6, message)


def rule_7_peers(plan: StepPlan, most: int) -> None:
    """No rank has more than `most` distinct peers: each one costs memory."""
    peers = loads.peers(plan)
    rank = _first(peers > most)
    if rank is not None:
        raise PlanError(7, f"rank {rank} has {peers[rank]} peers, above {most}")


def _rows(name: str, start: Ints, rows: int, end: int, least: int) -> None:
    """Refuse row starts that do not go from 0 to `end` in `rows` rows of at least `least`."""
    if len(start) != rows + 1 or start[0] != 0 or start[-1] != end:
        raise PlanError(0, f"{name} does not go from 0 to {end} in {rows} rows")
    row = short_row(start, end, least)
    if row >= 0:
        entries = start[row + 1] - start[row]
        raise PlanError(0, f"{name}: row {row} has {entries} entries, at least {least} belong there, {end} in all")


def _in_range(name: str, values: Ints, size: int, low: int, high: int) -> None:
    """Refuse values of another number than `size`, or out of low..high-1."""
    if len(values) != size:
        raise PlanError(0, f"{name} has {len(values)} entries, not {size}")
    at = out_of_range(values, low, high)
    if at >= 0:
        raise PlanError(0, f"{name}[{at}] is {values[at]}")


def _first(wrong: NDArray[np.bool_]) -> int | None:
    """Return the first place that is wrong, or None."""
    at = int(np.argmax(wrong)) if len(wrong) else 0
    return at if len(wrong) and wrong[at] else None


@njit(cache=True)
def _first_twice(values: Ints, row: Ints, size: int) -> int:
    """Return the first place whose value, below `size`, came before in its row, or -1. Rows come one after another."""
    latest = np.full(size, -1)
    for place in range(len(values)):
        if latest[values[place]] == row[place]:
            return place
        latest[values[place]] = row[place]
    return -1


@njit(cache=True)
def _first_out_of_order(ring_start: Ints, ring_ranks: Ints, shard_order: Ints, ranks: int) -> int:
    """Return the first shard that its rank sends to another before one that it receives later, or -1.

    Shards come rank by rank, in the order in which each runs them.
    """
    place, following = np.empty(len(shard_order), np.int64), np.full(len(shard_order), -1)
    for at in range(len(shard_order)):
        place[shard_order[at]] = at
    for ring in range(len(ring_start) - 1):
        if ring_start[ring + 1] - ring_start[ring] > 1:
            for shard in range(ring_start[ring], ring_start[ring + 1]):
                after = shard + 1
                following[shard] = after if after < ring_start[ring + 1] else ring_start[ring]
    sender, received = np.full(ranks, -1), np.zeros(ranks, np.int64)
    for shard in shard_order:
        after = following[shard]
        if after < 0:
            continue
        source, target = ring_ranks[shard], ring_ranks[after]
        if sender[target] == source and place[after] < received[target]:
            return shard
        sender[target], received[target] = source, place[after]
    return -1
