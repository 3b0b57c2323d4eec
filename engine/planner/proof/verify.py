"""Verify a plan of any planner before any rank starts: rules 0 to 7, one function each.

Rule 0 checks that the arrays are well-formed, so that the other rules can read them. The rules run in order, and the
first broken one is reported.

Note: [why the rules suffice]. With rules 3, 4 and 6 no rank waits forever:

- A rank waits only for the other members of its rings, for the other stages of a pipeline, in lockstep mode for all
  ranks at the start of each slot, and for all ranks in reductions.
- By rules 3 and 4, all passes can be put into one order that agrees with the order of every stage of every rank. Take
  the first unfinished pass in that order. Every pass before it is finished, so it is the next one on all ranks that
  take part in it, and they all enter it.
- By rules 3 and 6, these ranks post the same messages in the same order between each two of them, round by round. So
  every message is received, and the pass finishes. By induction all passes finish.
- In free mode all ranks also wait for each other in the reductions of gradients, bucket by bucket in one order. A rank
  enters them after its last pass, or, if the plan marks it, within its last backward pass. By rule 4 that pass is in no
  ring. So take all reductions and these passes as one node that follows all other passes: no other pass waits for it,
  and by the above all ranks reach it. In it each rank computes alone, and waits only for the same bucket of the others.
- In lockstep mode, by rule 5, all ranks have the same slots and a gang is in one slot. So the passes of a slot wait for
  nothing in a later slot, slots finish one after another, and every rank enters each of them.

Letters: S slices, P ranks, K shards, M micro-batches (step_plan.py).
"""

from __future__ import annotations

import numpy as np

from engine.errors import PlanError
from engine.planner.plan import loads
from engine.planner.plan.gangs import components, ends_alone
from engine.planner.plan.order import node_order, out_of_order
from engine.planner.plan.rows import first_out_of_range, first_short_row, first_true
from engine.planner.plan.step_plan import StepPlan
from engine.planner.planners import PLANNERS
from engine.planner.proof.checks import (
    above,
    crossed_shard,
    differs_within_gang,
    duplicate_in_row,
    gap_before,
    not_of_label,
    not_once,
    on_other_rank,
    out_of_slot,
    stranger,
    uneven_team,
)
from engine.planner.settings import PlanSettings
from engine.units import Ints

_MODES = ("free", "lockstep", "pipeline")
_INT64 = np.dtype(np.int64)
_MOST_TOKENS = 2**35  # in a step: products of tokens, layers and ppm stay below 2**63


def verify(plan: StepPlan, settings: PlanSettings) -> None:
    """Raise PlanError with the number of the first rule that `plan` breaks; the message names the sequence or rank."""
    rule_0_well_formed(plan, settings)
    rule_1_every_token_once(plan)
    rule_2_memory(plan, settings)
    rule_3_rings_and_gangs(plan)
    rule_4_no_deadlock(plan)
    rule_5_slots(plan)
    rule_6_messages(plan)
    rule_7_peers(plan, settings)


def rule_0_well_formed(plan: StepPlan, settings: PlanSettings) -> None:
    """The plan fits these settings, rows are complete, numbers are in range, and no rank and no ring is empty."""
    if plan.mode not in _MODES:
        raise PlanError(0, f"the plan's mode is {plan.mode}")
    for name in ("mode", "ranks", "capacity", "stages"):
        got, expected = getattr(plan, name), getattr(settings, name)
        if got != expected:
            raise PlanError(0, f"the plan's {name} is {got}, not {expected}")
    if plan.stages != 1 and plan.mode != "pipeline":
        raise PlanError(0, f"{plan.mode} mode has no stages, but the plan has {plan.stages}")
    # The other rules index these arrays, so shapes and ranges are checked first.
    for name, array in plan.arrays().items():
        if array.ndim != 1 or array.dtype != _INT64:
            raise PlanError(0, f"{name} is not a one-dimensional array of 64-bit integers")
    slices, shards, micro_batches = len(plan.lengths), len(plan.ring_ranks), len(plan.gang)
    if slices == 0:
        raise PlanError(0, "the plan has no sequences")
    _check_rows("ring_start", plan.ring_start, rows=slices, end=shards, least=1)
    _check_rows("micro_start", plan.micro_start, rows=plan.ranks, end=micro_batches, least=1)
    _check_rows("shard_start", plan.shard_start, rows=micro_batches, end=shards, least=0)
    _check_range("lengths", plan.lengths, slices, 1, _MOST_TOKENS)
    _check_range("ring_ranks", plan.ring_ranks, shards, 0, plan.ranks)
    _check_range("shard_order", plan.shard_order, shards, 0, shards)
    _check_range("gang", plan.gang, micro_batches, 0, micro_batches)
    _check_range("slot", plan.slot, micro_batches, -1, micro_batches)
    _check_range("offload", plan.offload, micro_batches, 0, settings.offload + 1)
    _check_range("overlap", plan.overlap, plan.ranks, 0, 2)
    passes = 2 * plan.stages * int(np.diff(plan.micro_start).max()) if plan.mode == "pipeline" else 0
    _check_range("passes", plan.passes, passes, 0, passes)
    if not_once(plan.passes) >= 0:
        raise PlanError(0, "passes does not list every pass once")
    _check_range("before", plan.before, slices, 0, _MOST_TOKENS)
    _check_range("team", plan.team, slices, 1, plan.ranks + 1)
    at = uneven_team(plan.ring_start, plan.team)
    if at >= 0:
        raise PlanError(0, f"slice {at} has a ring of {plan.degrees[at]} ranks in teams of {plan.team[at]}")
    if plan.lengths.sum() > _MOST_TOKENS:
        raise PlanError(0, f"the plan has {plan.lengths.sum()} tokens, but a step has at most {_MOST_TOKENS}")


def rule_1_every_token_once(plan: StepPlan) -> None:
    """Every token of every sequence is on exactly one rank.

    The slices of a sequence must follow each other without gaps. A slice is split by a fixed rule
    (schedule.chunk_start) that covers each token once. So it is enough that each shard is in exactly one micro-batch,
    and that this micro-batch runs on the rank that holds the shard in its ring.
    """
    at = gap_before(plan.before, plan.lengths)
    if at >= 0:
        end = plan.before[at - 1] + plan.lengths[at - 1] if at else 0
        message = f"slice {at} starts at token {plan.before[at]} of its sequence, the one before ends at {end}"
        raise PlanError(1, message)
    shard = not_once(plan.shard_order)
    if shard >= 0:
        sequence, times = plan.slice_sequence[plan.shard_slice[shard]], int((plan.shard_order == shard).sum())
        raise PlanError(1, f"shard {shard} of sequence {sequence} is in {times} micro-batches, not in one")
    shard = on_other_rank(plan.micro_start, plan.shard_start, plan.shard_order, plan.ring_ranks)
    if shard >= 0:
        sequence, rank = plan.slice_sequence[plan.shard_slice[shard]], plan.ring_ranks[shard]
        runs_on = plan.micro_rank[plan.shard_micro[shard]]
        raise PlanError(1, f"rank {runs_on} runs the shard of sequence {sequence} that belongs to rank {rank}")


def rule_2_memory(plan: StepPlan, settings: PlanSettings) -> None:
    """Each micro-batch is within its rank's capacity, its peak bytes fit the device, and its offload fits the host.

    With offload, the capacity bounds the tokens whose activations stay on the device (ByteScale, equation 3); the peak
    bytes count all tokens.
    """
    costs, offload, staged = settings.costs, plan.offload, plan.mode == "pipeline"
    tokens, buffers = loads.micro_loads(plan)
    offloads = np.flatnonzero(offload)
    resident = tokens
    if len(offloads) > 0:
        resident = tokens.copy()
        resident[offloads] = costs.resident(tokens[offloads], offload[offloads])
    _check_bound("holds {} tokens", resident, settings.capacities, plan)
    if staged:
        needed = loads.peak_bytes(plan, costs)
    else:
        # Only micro-batches that need offload on some device may not fit.
        large = np.flatnonzero(np.maximum(tokens, buffers) > (settings.most_without_offload or -1))
        needed = np.zeros_like(tokens)
        if len(large) > 0:
            needed[large] = costs.peak_bytes(tokens[large], buffers[large], offload[large])
    _check_bound("needs {} bytes", needed, settings.cluster.memory, plan)
    if len(offloads) > 0:
        if staged:
            away = loads.host_bytes(plan, costs, loads.in_flight(plan, costs))
        else:
            away = np.zeros_like(tokens)
            away[offloads] = costs.host_bytes(tokens[offloads], offload[offloads])
        _check_bound("offloads {} bytes", away, np.full(plan.ranks, settings.host_memory), plan)


def rule_3_rings_and_gangs(plan: StepPlan) -> None:
    """A ring's ranks are distinct; a gang is exactly the micro-batches that rings connect, at most one per rank.

    The members of a ring agree on its order because the plan lists each ring once. All slices of a sequence have the
    same ring, because each rank keeps the K,V of its shards for the later slices.
    """
    at = _changes_ring(plan)
    if at >= 0:
        raise PlanError(3, f"slice {at} has another ring than the slice that it continues")
    shard = duplicate_in_row(plan.ring_start, plan.ring_ranks, plan.ranks)
    if shard >= 0:
        sequence, rank = plan.slice_sequence[plan.shard_slice[shard]], plan.ring_ranks[shard]
        raise PlanError(3, f"rank {rank} appears twice in the ring of sequence {sequence}")
    label = components(plan.shard_micro, plan.ring_start, plan.micro_batches)
    micro = not_of_label(plan.gang, label)
    if micro >= 0:
        raise PlanError(3, f"micro-batches {label[micro]} and {micro} share rings but are not in one gang")
    micro = differs_within_gang(plan.gang, label)
    if micro >= 0:
        raise PlanError(3, f"gang {plan.gang[micro]} has micro-batches that no rings connect")
    micro = duplicate_in_row(plan.micro_start, plan.gang, plan.micro_batches)
    if micro >= 0:
        raise PlanError(3, f"rank {plan.micro_rank[micro]} has two micro-batches in gang {plan.gang[micro]}")


def rule_4_no_deadlock(plan: StepPlan) -> None:
    """The graph of passes and transfers (plan/order.py) has no cycle, and slices of a sequence run in their order.

    On each stage, forward passes run from its first slice to the last, and backward passes from the last to the first.
    Only in free mode ranks reduce gradients within their last backward pass, and only where no rank waits for this pass
    in a ring.
    """
    node_order(plan)
    marked = plan.overlap > ends_alone(plan.gang, plan.micro_start) if plan.mode == "free" else plan.overlap > 0
    rank = first_true(marked)
    if rank >= 0:
        raise PlanError(4, f"rank {rank} reduces gradients within its last backward pass, for which others wait")
    if plan.sequences < plan.slices:
        shard = first_true(out_of_order(plan))
        if shard >= 0:
            at = plan.shard_slice[shard]
            raise PlanError(4, f"on rank {plan.ring_ranks[shard]} slice {at} runs before the slice that it continues")


def rule_5_slots(plan: StepPlan) -> None:
    """In lockstep mode all ranks have the same slots, in order, and each gang is in one. Other modes have no slots."""
    if plan.mode != "lockstep":
        micro = first_out_of_range(plan.slot, -1, 0)
        if micro >= 0:
            raise PlanError(5, f"micro-batch {micro} has slot {plan.slot[micro]} in {plan.mode} mode")
        return
    counts = np.diff(plan.micro_start)
    rank = first_true(counts != counts[0])
    if rank >= 0:
        raise PlanError(5, f"rank {rank} has {counts[rank]} slots, rank 0 has {counts[0]}")
    micro = out_of_slot(plan.slot, plan.micro_start)
    if micro >= 0:
        raise PlanError(5, f"rank {plan.micro_rank[micro]} has slot {plan.slot[micro]} out of order")
    micro = differs_within_gang(plan.gang, plan.slot)
    if micro >= 0:
        raise PlanError(5, f"gang {plan.gang[micro]} is in more than one slot")


def rule_6_messages(plan: StepPlan) -> None:
    """Every send has its receive, and two ranks post the messages between them in the same order.

    In each round of a layer's forward or backward pass, every part of a ring sends one buffer of each kind to the next
    part, which receives exactly this buffer (schedule.transfers; tests/planner/plan/test_schedule.py checks many
    degrees). Which hops of K,V and of dK,dV run together follows from the numbers of their rounds alone, so it is the
    same on all ranks (schedule.call_of_round). The same is true of the rounds of the expert counts, after the last
    layer. All members go through layers, passes and rounds in the same order, and by rule 4 through gangs. So all
    messages from one rank to another pair up if both micro-batches of a gang list the rings that connect them in the
    same order. The members of a team exchange queries before the rounds, and results after them, with all mates of all
    rings at once.
    """
    hops = [plan.next_shard[None]]
    if int(plan.team.max()) > 1:
        hops.append(np.stack([plan.mates(turn) for turn in range(1, int(plan.team.max()))]))
        hops.append(plan.hops(np.ones_like(plan.team))[None])  # expert counts
    for together in hops:
        shard, turn = crossed_shard(together, plan.ring_ranks, plan.shard_order, plan.shard_micro, plan.ranks)
        if shard >= 0:
            at, sender = plan.shard_slice[shard], plan.ring_ranks[shard]
            receiver = plan.ring_ranks[together[turn, shard]]
            raise PlanError(6, f"rank {sender} sends slice {at} later than rank {receiver} expects it")


def rule_7_peers(plan: StepPlan, settings: PlanSettings) -> None:
    """No rank has more peers than `max_peers`, because each costs memory, or a peer that the planner does not name.

    Ranks connect to all peers that the planner names before the first step. With NCCL, a message to another one would
    build a connection in the middle of a step.
    """
    peers = loads.peers(plan)
    rank = int(peers.argmax())
    if peers[rank] > settings.max_peers:
        raise PlanError(7, f"rank {rank} has {peers[rank]} peers, more than {settings.max_peers}")
    named = np.ascontiguousarray(PLANNERS[settings.planner].peers(settings), dtype=np.int64)
    if named.ndim != 2 or len(named) != plan.ranks:
        raise PlanError(7, f"{settings.planner} names peers of shape {named.shape}, not [{plan.ranks}, N]")
    near = loads.near(plan)
    shard, at = stranger(plan.ring_ranks, near, named)
    if shard >= 0:
        one, other = plan.ring_ranks[shard], near[shard, at]
        raise PlanError(
            7, f"ranks {one} and {other} exchange messages, but {settings.planner} does not name them peers"
        )


def _changes_ring(plan: StepPlan) -> int:
    """Return the first slice whose ring is not that of the slice that it continues, or -1."""
    if plan.sequences == plan.slices:
        return -1
    later = np.flatnonzero(plan.before > 0)
    changes = plan.degrees[later] != plan.degrees[later - 1]
    if not changes.any():
        shard = np.flatnonzero(plan.before[plan.shard_slice] > 0)
        differs = plan.ring_ranks[shard] != plan.ring_ranks[shard - plan.degrees[plan.shard_slice[shard]]]
        return int(plan.shard_slice[shard[differs][0]]) if differs.any() else -1
    return int(later[changes][0])


def _check_rows(name: str, start: Ints, rows: int, end: int, least: int) -> None:
    """Raise PlanError(0) if row starts do not go from 0 to `end` in `rows` rows of at least `least` items."""
    if len(start) != rows + 1 or start[0] != 0 or start[-1] != end:
        raise PlanError(0, f"{name} does not go from 0 to {end} in {rows} rows")
    row = first_short_row(start, end, least)
    if row >= 0:
        message = f"{name}: row {row} goes from {start[row]} to {start[row + 1]}; it needs at least {least}"
        raise PlanError(0, f"{message}, and all rows together have {end}")


def _check_range(name: str, values: Ints, size: int, low: int, high: int) -> None:
    """Raise PlanError(0) if an array does not have `size` entries, or has a value outside low .. high - 1."""
    if len(values) != size:
        raise PlanError(0, f"{name} has {len(values)} entries, not {size}")
    at = first_out_of_range(values, low, high)
    if at >= 0:
        raise PlanError(0, f"{name}[{at}] is {values[at]}")


def _check_bound(action: str, values: Ints, bounds: Ints, plan: StepPlan) -> None:
    """Raise PlanError(2) for a micro-batch whose entry in `values` [M] is above its rank's entry in `bounds` [P].

    `action` formats the value for the message.
    """
    micro = above(values, bounds, plan.micro_start)
    if micro >= 0:
        amount, rank = action.format(values[micro]), plan.micro_rank[micro]
        raise PlanError(2, f"rank {rank} {amount} in micro-batch {micro}, above {bounds[rank]}")
