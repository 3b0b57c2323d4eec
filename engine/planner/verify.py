"""What is proved of every plan of every planner before any rank starts: rules 1 to 7, each a function.

Rule 0 is that the arrays are well-formed, so that the others may read them; so rules are tried in order and the first
broken one is reported. Why they suffice: a rank blocks only in its rings, and in a pipeline where a stage waits for
another one of its rank. By rules 3 and 4 some order of passes agrees with every stage of every rank, so the first
unfinished pass has all its members at it; by rules 3 and 6 these members post the same messages in the same order
between each two of them, round by round, so it finishes. Then the next one does.
Letters: S sequences, P ranks, K shards, M micro-batches (plan.py).
"""

from __future__ import annotations

import numpy as np

from engine.errors import PlanError
from engine.planner import checks, loads
from engine.planner.gangs import components
from engine.planner.order import prove_order
from engine.planner.plan import Ints, StepPlan
from engine.planner.rows import out_of_range, short_row
from engine.planner.settings import PlanSettings

_MODES = ("free", "lockstep", "pipeline")
_MOST_TOKENS = 2**35  # of a step: no product of tokens, layers and ppm passes 63 bits


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
    if plan.stages != 1 and plan.mode != "pipeline":
        raise PlanError(0, f"{plan.mode} mode has no stages, and the plan has {plan.stages}")
    for name, array in plan.arrays().items():
        if array.ndim != 1 or array.dtype != np.int64:
            raise PlanError(0, f"{name} is not a row of 64-bit integers")
    sequences, shards, micro_batches = len(plan.lengths), len(plan.ring_ranks), len(plan.gang)
    if sequences == 0:
        raise PlanError(0, "the plan has no sequence")
    _rows("ring_start", plan.ring_start, rows=sequences, end=shards, least=1)
    _rows("micro_start", plan.micro_start, rows=plan.ranks, end=micro_batches, least=1)
    _rows("shard_start", plan.shard_start, rows=micro_batches, end=shards, least=0)
    _in_range("lengths", plan.lengths, sequences, 1, _MOST_TOKENS)
    _in_range("ring_ranks", plan.ring_ranks, shards, 0, plan.ranks)
    _in_range("shard_order", plan.shard_order, shards, 0, shards)
    _in_range("gang", plan.gang, micro_batches, 0, micro_batches)
    _in_range("slot", plan.slot, micro_batches, -1, micro_batches)
    _in_range("offload", plan.offload, micro_batches, 0, settings.offload + 1)
    if int(plan.lengths.sum()) > _MOST_TOKENS:
        raise PlanError(0, f"the plan has {plan.lengths.sum()} tokens, and a step at most {_MOST_TOKENS}")


def rule_1_every_token_once(plan: StepPlan) -> None:
    """Every token of every sequence is on exactly one rank.

    The shards of a sequence are cut by rule (schedule.chunk_start), so each shard's being in one micro-batch of its
    rank is all that is left to show.
    """
    shard = checks.not_once(plan.shard_order)
    if shard >= 0:
        times = np.count_nonzero(plan.shard_order == shard)
        sequence = plan.shard_sequence[shard]
        raise PlanError(1, f"shard {shard} of sequence {sequence} is in {times} micro-batches, not in one")
    place = checks.astray(plan.micro_start, plan.shard_start, plan.shard_order, plan.ring_ranks)
    if place >= 0:
        shard = plan.shard_order[place]
        sequence, ring = plan.shard_sequence[shard], plan.ring_ranks[shard]
        rank = plan.micro_rank[plan.shard_micro[shard]]
        raise PlanError(1, f"rank {rank} runs the shard of sequence {sequence} that its ring puts on rank {ring}")


def rule_2_memory(plan: StepPlan, settings: PlanSettings) -> None:
    """Each micro-batch keeps to its rank's capacity, its peak bytes fit the device, and what it offloads the host.

    With offload the capacity bounds the tokens whose activations stay (equation 3); the peak counts all of them.
    """
    costs, rank = settings.costs, plan.micro_rank
    tokens, buffers = loads.micro_loads(plan)
    memory, offload = settings.cluster.memory, plan.offload
    some = bool(offload.any())
    _bounded("holds {} tokens", costs.resident(tokens, offload) if some else tokens, settings.capacities, rank)
    if costs.peak_bytes(tokens.max(), buffers.max()) > memory.min():  # else each fits, and none has to be looked at
        _bounded("needs {} bytes", costs.peak_bytes(tokens, buffers, offload), memory, rank)
    if some:
        host = np.full(plan.ranks, settings.host_memory)
        _bounded("offloads {} bytes", costs.host_bytes(tokens, offload), host, rank)


def rule_3_rings_and_gangs(plan: StepPlan) -> None:
    """A ring has distinct members; a gang is just what rings connect, with at most one micro-batch a rank.

    On a ring's order its members agree because there is one list of them.
    """
    shard = checks.twice_in_row(plan.ring_start, plan.ring_ranks, plan.ranks)
    if shard >= 0:
        sequence, rank = plan.shard_sequence[shard], plan.ring_ranks[shard]
        raise PlanError(3, f"rank {rank} is twice in the ring of sequence {sequence}")
    label = components(plan.shard_micro, plan.ring_start, plan.micro_batches)
    micro = checks.other_gang(plan.gang, label)
    if micro >= 0:
        raise PlanError(3, f"micro-batches {label[micro]} and {micro} share rings but are not in one gang")
    micro = checks.mixed_gang(plan.gang, label)
    if micro >= 0:
        raise PlanError(3, f"gang {plan.gang[micro]} has micro-batches that no rings connect")
    micro = checks.twice_in_row(plan.micro_start, plan.gang, plan.micro_batches)
    if micro >= 0:
        raise PlanError(3, f"rank {plan.micro_rank[micro]} has two micro-batches in gang {plan.gang[micro]}")


def rule_4_no_deadlock(plan: StepPlan) -> None:
    """The graph of the gangs' passes, with the edges of each stage's actual execution order, has no cycle."""
    prove_order(plan)


def rule_5_slots(plan: StepPlan) -> None:
    """In lockstep mode all ranks have the same slots, in order, and a gang sits in one. Other modes have none."""
    if plan.mode != "lockstep":
        micro = out_of_range(plan.slot, -1, 0)
        if micro >= 0:
            raise PlanError(5, f"micro-batch {micro} has slot {plan.slot[micro]} in {plan.mode} mode")
        return
    counts = np.diff(plan.micro_start)
    rank = int(np.argmax(counts != counts[0]))
    if counts[rank] != counts[0]:
        raise PlanError(5, f"rank {rank} has {counts[rank]} slots, rank 0 has {counts[0]}")
    micro = checks.out_of_order(plan.slot, plan.micro_start)
    if micro >= 0:
        raise PlanError(5, f"rank {plan.micro_rank[micro]} has slot {plan.slot[micro]} out of its order")
    micro = checks.mixed_gang(plan.gang, plan.slot)
    if micro >= 0:
        raise PlanError(5, f"gang {plan.gang[micro]} sits in more than one slot")


def rule_6_messages(plan: StepPlan) -> None:
    """Every send has its receive, and each two ranks post their messages to each other in the same order.

    In a round of a direction of a layer every part of a ring sends one buffer of each kind to the next part, which
    receives just that one (schedule.transfers; tests/planner/test_schedule.py proves it for every degree it tries); so
    it does in a round of the counts, after the last layer. The members walk through layers, directions and rounds
    alike. So between two ranks all messages pair up in order if the rings by which the first sends to the second come
    in the same order on both: the order of micro-batches on a rank, then of shards in a micro-batch.
    """
    shard = checks.crossed(plan.ring_start, plan.ring_ranks, plan.shard_order, plan.ranks)
    if shard >= 0:
        sequence = int(plan.shard_sequence[shard])
        target = int(loads.neighbours(plan)[0][shard])
        message = f"rank {plan.ring_ranks[shard]} sends sequence {sequence} out of the order of rank {target}"
        raise PlanError(6, message)


def rule_7_peers(plan: StepPlan, most: int) -> None:
    """No rank has more than `most` distinct peers: each one costs memory."""
    peers = loads.peers(plan)
    rank = int(peers.argmax())
    if peers[rank] > most:
        raise PlanError(7, f"rank {rank} has {peers[rank]} peers, above {most}")


def _rows(name: str, start: Ints, rows: int, end: int, least: int) -> None:
    """Refuse row starts that do not go from 0 to `end` in `rows` rows of at least `least`."""
    if len(start) != rows + 1 or start[0] != 0 or start[-1] != end:
        raise PlanError(0, f"{name} does not go from 0 to {end} in {rows} rows")
    row = short_row(start, end, least)
    if row >= 0:
        message = f"{name}: row {row} goes from {start[row]} to {start[row + 1]}, {least} or more belong there"
        raise PlanError(0, f"{message}, {end} in all")


def _in_range(name: str, values: Ints, size: int, low: int, high: int) -> None:
    """Refuse values of another number than `size`, or out of low..high-1."""
    if len(values) != size:
        raise PlanError(0, f"{name} has {len(values)} entries, not {size}")
    at = out_of_range(values, low, high)
    if at >= 0:
        raise PlanError(0, f"{name}[{at}] is {values[at]}")


def _bounded(what: str, values: Ints, bounds: Ints, rank: Ints) -> None:
    """Refuse a micro-batch, [M], above its rank's bound, [P]; `what` says what the rank does with how much."""
    above = values > bounds[rank]
    micro = int(above.argmax())
    if above[micro]:
        doing, most = what.format(values[micro]), bounds[rank[micro]]
        raise PlanError(2, f"rank {rank[micro]} {doing} in micro-batch {micro}, above {most}")
