"""Costs of a model on a machine: times, FLOPs and bytes for planner, simulator and memory estimate.

Costs are frozen and equal on every rank. Times are in nanoseconds, computed from rates (calibration.py) by arithmetic
alone: no measured time of a run enters a plan. Memory and traffic are whole bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from engine.cluster.cluster import Cluster
from engine.config.devices import uses_gpus
from engine.config.schema import Config
from engine.cost import activations, calibration, flops
from engine.cost.activations import Instant
from engine.cost.calibration import Calibration
from engine.cost.collectives import collectives, expert_collectives, hops, tensor_collectives
from engine.cost.datasheets import nominal, sheet_peak
from engine.cost.linear import ffn_share, token_seconds
from engine.cost.sizes import bucket_elements, element_bytes, parameters, ray_bytes, update_bytes
from engine.cost.stages import stages, work_shares
from engine.cost.states import states
from engine.cost.times import Rates, rounds_per_call, unsplit_times
from engine.family.families import family_of
from engine.family.layers import part
from engine.units import NS, PPM, Floats, Ints

_LARGEST_TEAM = 4  # of a ring: larger ones send more queries than they save K,V, and have more peers


@dataclass(frozen=True)
class Costs:
    """Nanoseconds, FLOPs and bytes of one HDP rank. A rank is d_tp x d_pp devices; bytes are those of each device.

    In a pipeline, the fields that count layers and bytes are those of the first stage, and `later_stages` has those of
    the others. Methods return bytes of the stage that decides. Without the other micro-batches in flight as an
    argument, they count those of 1F1B, as if all were equally large. Fields without a unit in their names are counts,
    or have it in their comments.
    """

    source: str  # where the rates come from
    parameters: int
    layers: int  # of a device
    linear_flops: int  # forward, per token
    attention: tuple[flops.Attention, ...]  # layers by their window, with the FLOPs of a (query, key) pair
    peak_flops_per_s: float  # of one device, by its data sheet: MFU is relative to this
    devices: int  # of one HDP rank
    rates: Rates
    nics: float  # network cards of a node / d_tp
    slot: int  # ns of a lockstep slot in addition to its micro-batch: ZeRO's collectives that nothing hides
    # ns of a slot's collectives that travel while layers compute, forward and backward: ZeRO-3's gathers of weights,
    # ZeRO-2's reductions.
    gathers: tuple[int, int]
    step: int  # ns of a step in addition to its micro-batches, for reducing gradients and updating weights
    token_bytes: int  # saved by a device's layers per token of a micro-batch, already times `in_flight`
    instants: tuple[Instant, ...]  # other bytes of a micro-batch; [0]: in a layer's backward pass, then at the loss
    ring_bytes: int  # ring buffers, per token of a ring's largest shard
    fixed_bytes: int  # model states and ZeRO's buffers on the device
    forward_hop_bytes: int  # K,V of a token in all layers, sent once
    backward_hop_bytes: int  # dK,dV of a token in all layers, sent once
    forward_rings: int  # passes in which K,V travel: 2, or 3 if the forward pass is recomputed
    counts_bytes: int  # of a shard's message of expert counts, sent once in each hop of its rounds; 0 without counts
    host_fixed_bytes: int = 0  # model states on the host, and the share of Ray's memory (sizes.py)
    closing_bytes: int = 0  # in addition to the states at the end of a step, after activations are released
    in_flight: int = 1  # micro-batches whose activations a device holds at once, counted in `token_bytes`
    slice_kv_bytes: int = 0  # per token of a slice that later slices attend to: its K,V, until its backward pass
    slice_dkv_bytes: int = 0  # per token of the same, from the backward pass of the last slice on: gradients of K,V
    query_bytes: int = 0  # queries of a token in all layers, sent once
    result_bytes: int = 0  # output of a token in all layers, or the gradient of its queries, sent once
    team_bytes: int = 0  # per token of the other members of a team: queries and results of one layer
    later_stages: tuple[Costs, ...] = ()  # the other stages of a pipeline: only their layers and bytes differ
    reduction: int = 0  # ns of `step` in which ZeRO-1 reduces gradients, if it may do so within a last backward pass
    # Part of the gradients that is reduced last, and complete at the end of a backward pass only.
    last_bucket: float = 1.0
    work_shares: tuple[float, ...] = (1.0,)  # of the model's work that a device of each stage does (stages.py)

    @classmethod
    def of(cls, config: Config, cluster: Cluster, rates: Calibration | None = None) -> Costs:
        """The costs of a config with the given rates, by default those of its cluster (`machine`).

        `cluster` has the devices as ranks. Model states are partitioned over all of its HDP ranks. Raises ConfigError
        for a calibration that cannot be used, and as `Cluster.hdp`.
        """
        hdp, rates = cluster.hdp(config.parallel), (rates or machine(config)).of(config.linear_dtype)
        model, dtype, tp = config.model, config.dtype, config.parallel.tp
        b, w = element_bytes(dtype)
        kv_elements = 2 * model.layers * model.kv_heads * model.head_dim
        devices = tp * config.parallel.pp
        sent, reduce_rate = collectives(config, hdp.ranks), _reduce_rate(config, rates, hdp)
        hooks = model.layers * rates.gather_s if config.zero.stage == 3 else 0.0
        reduction = (sent.step + sent.reduction) / reduce_rate + _latency(config, rates, hdp.ranks)
        of_step, of_slot = (reduction, 0.0) if config.zero.stage == 1 else (0.0, reduction)
        # Stages 1 and 2 reduce buckets while a backward pass computes, but for the last: that of the embedding if it is
        # larger. CPUs and pipelines reduce after it (Note: [reductions and rings] in docs/design.md), and stage 3 when
        # no layer computes (`overlap_comm` in zero/settings.py).
        hides, last = uses_gpus(config) and config.parallel.pp == 1 and config.zero.stage < 3, 1.0
        if hides:
            elements = max(bucket_elements(config, hdp.ranks) * devices, model.vocab * model.hidden)
            last = min(1.0, elements / parameters(model))
        gathers = (sent.forward - sent.layer) / reduce_rate, (sent.backward - sent.layer) / reduce_rate
        costs = cls(
            source=f"{rates.device} ({rates.source})",
            parameters=parameters(model),
            linear_flops=flops.linear_flops(model),
            attention=flops.attention(model),
            peak_flops_per_s=rates.peak_flops_per_s,
            devices=devices,
            rates=rates_of(config, rates, cluster, hdp),
            nics=rates.nics_per_node / tp,  # each of a rank's devices sends its part
            # Stage 3 gathers the weights of the next layer while a layer computes, so only the first layer of a pass
            # waits for its own.
            slot=round(NS * (2 * sent.layer / reduce_rate + hooks + last * of_slot)),
            gathers=_nanoseconds(gathers[0], gathers[1] + (1 - last) * of_slot),
            step=round(NS * (rates.step_s + of_step + _update_seconds(config, rates, hdp))),
            reduction=round(NS * of_step) if hides else 0,
            last_bucket=last,
            forward_hop_bytes=kv_elements * b,
            backward_hop_bytes=kv_elements * w,
            query_bytes=model.layers * model.heads * model.head_dim * b,
            result_bytes=model.layers * model.heads * model.head_dim * w,
            forward_rings=3 if config.recompute == "layer" else 2,
            work_shares=work_shares(config, rates),
            counts_bytes=activations.counts_bytes(model, config.parallel.pp) if config.balance.by == "loss" else 0,
            **_bytes(config, hdp.ranks)[0],
        )
        return costs.among(config, hdp.ranks)

    def among(self, config: Config, ranks: int) -> Costs:
        """A copy of the costs with the bytes for a cluster of `ranks` HDP ranks. Times do not change."""
        first, *others = _bytes(config, ranks)
        later = tuple(replace(self, **of_stage, later_stages=()) for of_stage in others)
        return replace(self, **first, later_stages=later)

    @property
    def stages(self) -> tuple[Costs, ...]:
        """The costs of each stage of a pipeline, without those of the others; of the model, if it has no stages."""
        return (replace(self, later_stages=()), *self.later_stages) if self.later_stages else (self,)

    @property
    def shares(self) -> Floats:
        """`work_shares` as an array, [n]."""
        return np.array(self.work_shares)

    @property
    def most_hidden(self) -> float:
        """The most of `reduction` that backward passes hide, in ns: all but the last bucket."""
        return (1 - self.last_bucket) * self.reduction

    @property
    def fixed(self) -> int:
        """Fixed cost of a micro-batch, in ns."""
        return round(self.rates.micro)

    def sequence(self, lengths: Ints) -> Ints:
        """Time of each sequence if unsplit, in ns, [S]: its useful work, which rings distribute but never reduce."""
        return unsplit_times(self.rates, np.ascontiguousarray(lengths, dtype=np.int64))

    def flops(self, lengths: Ints) -> int:
        """Model FLOPs of a step of sequences of `lengths` [S], forward and backward."""
        # In Python's integers, once for each length: many sequences of a large step have the same.
        distinct = zip(*(column.tolist() for column in np.unique(lengths, return_counts=True)), strict=True)
        attention = sum(count * flops.attention_flops(self.attention, length) for length, count in distinct)
        return flops.PASSES * (self.linear_flops * int(lengths.sum()) + attention)

    def peak_bytes(
        self,
        tokens: Ints,
        ring_tokens: Ints,
        offload: Ints | int = 0,
        waiting: Sequence[Ints] | None = None,
    ) -> Ints:
        """Peak bytes on a device of a rank in micro-batches of `tokens` [M] with offload ratio `offload` (ppm).

        `ring_tokens` [M] is the size of the ring buffers: the sum of the largest shards of all rings of a micro-batch.
        `waiting` has for each stage the tokens [M] of other micro-batches in flight whose activations are on the device
        (planner/plan/loads.py); None: as many as in 1F1B, all as large as this one. The result is at least the bytes at
        the end of the step (`closing_bytes`), where activations are already released.
        """
        during = self.fullest(tokens, offload, None if waiting is None else waiting[0])
        peak = self.fixed_bytes + np.maximum(during + self.ring_bytes * ring_tokens, self.closing_bytes)
        # Stages are different devices: the fullest one decides whether a plan fits.
        for number, stage in enumerate(self.later_stages, start=1):
            own = None if waiting is None else waiting[number : number + 1]
            peak = np.maximum(peak, stage.peak_bytes(tokens, ring_tokens, offload, own))
        return peak

    def fullest(self, tokens: Ints, offload: Ints | int, waiting: Ints | None = None) -> Ints:
        """Peak bytes of micro-batches without states and ring buffers: when the backward pass begins (docs/memory.md).

        In a pipeline those of the first stage. `waiting` [M] are the tokens of the micro-batches that wait for their
        backward pass; None: as many as in 1F1B, all as large as this one.
        """
        own = self.resident_here(tokens, offload)
        if waiting is None:
            waiting = (self.in_flight - 1) * own
        # `token_bytes` is already times `in_flight`, but `own` and `waiting` are the tokens of all: so it is divided,
        # rounded up.
        return -(-self.token_bytes * (own + waiting) // self.in_flight) + self.working(tokens)

    def working(self, tokens: Any) -> Any:
        """Bytes of a micro-batch in addition to what its layers save, at the fullest of `instants`.

        `tokens` is a number or an array.
        """
        return reduce(np.maximum, (instant.of(tokens) for instant in self.instants))

    def resident(self, tokens: Ints, offload: Ints | int) -> Ints:
        """Saved activations of a micro-batch that stay on the device, in tokens (equation 3 of ByteScale).

        At offload ratio r, given as `offload` in ppm, all activations of two layers stay, and 1 - r of the others. All
        layers of a stage count as saving equally many bytes; windows do not change them. In a pipeline most tokens stay
        on the stage with the fewest layers.
        """
        later = (stage.resident(tokens, offload) for stage in self.later_stages)
        return reduce(np.maximum, later, self.resident_here(tokens, offload))

    def resident_here(self, tokens: Ints, offload: Ints | int) -> Ints:
        """The tokens of `resident` on the first stage alone."""
        if self.layers <= 2:
            return np.asarray(tokens)
        stays = 2 * PPM + (PPM - np.asarray(offload, dtype=np.int64)) * (self.layers - 2)
        return -(-tokens * stays // (self.layers * PPM))

    def host_bytes(self, tokens: Ints, offload: Ints | int) -> Ints:
        """Bytes that micro-batches of `tokens` put on the host at offload ratio `offload` (ppm)."""
        away = self.token_bytes * (tokens - self.resident_here(tokens, offload))
        return reduce(np.maximum, (stage.host_bytes(tokens, offload) for stage in self.later_stages), away)

    def most_tokens(self, device_memory: int) -> int:
        """Most tokens of a micro-batch, all in rings, that fit on a device of this size without offload; 0 if none."""
        if self.later_stages:
            return min(stage.most_tokens(device_memory) for stage in self.stages)
        available, saved = device_memory - self.fixed_bytes, self.token_bytes + self.ring_bytes
        if available < self.closing_bytes:
            return 0
        return max(0, min(instant.most(available, saved) for instant in self.instants))

    def seconds(self, ns: float) -> float:
        return ns / NS


def _bytes(config: Config, ranks: int) -> list[dict[str, Any]]:
    """The fields of `Costs` that depend on the number of ranks and the stage, for each stage: layers and bytes of a
    device."""
    model, dtype, mode, tile = config.model, config.dtype, config.recompute, config.mlp_tile
    tp, pp = config.parallel.tp, config.parallel.pp
    b, w = element_bytes(dtype)
    held = [states(config, ranks, stage) for stage in range(pp)]
    kinds = family_of(model).layers(model)
    found = []
    for stage, layers in enumerate(stages(config)):
        own, in_flight = len(layers), pp - stage  # 1F1B (planner/plan/order.py)
        saved = activations.layers_bytes(model, part(kinds, layers), dtype, mode, tile) * in_flight
        found.append(
            {
                "layers": own,
                "in_flight": in_flight,
                "token_bytes": -(-saved // tp),
                "instants": activations.instants(config, stage),
                "slice_kv_bytes": -(-2 * own * model.kv_heads * model.head_dim * b // tp),
                "slice_dkv_bytes": -(-2 * own * model.kv_heads * model.head_dim * w // tp),
                "team_bytes": model.heads * model.head_dim * (3 * b + 3 * w) // tp,
                # In a pipeline, slices have buffers even on a single rank.
                "ring_bytes": -(-activations.ring_bytes(model, dtype, pp) // tp) if ranks > 1 or pp > 1 else 0,
                "fixed_bytes": held[stage].device,
                "closing_bytes": held[stage].closing,
                # The same for all stages, because limits of host memory are: each subtracts it from a rank's memory.
                "host_fixed_bytes": max(one.host for one in held) + ray_bytes(config),
            }
        )
    return found


def machine(config: Config) -> Calibration:
    """The measured rates of the config's cluster if it names a calibration, else those of the data sheet."""
    name, path = config.cluster.name, config.cluster.calibration
    return nominal(name, config.model.head_dim) if path is None else calibration.read(Path(path), name)


def known_peak(config: Config) -> float | None:
    """Peak FLOP/s of a device, to which MFU is relative, or None: without a calibration that of a CPU is not known."""
    return sheet_peak(config.cluster.name) if config.cluster.calibration is None else machine(config).peak_flops_per_s


def rates_of(config: Config, rates: Calibration, cluster: Cluster, hdp: Cluster) -> Rates:
    """Convert a calibration to nanoseconds of the config's model on one HDP rank.

    The ranks of `cluster` are devices, those of `hdp` are HDP ranks.

    Tensor parallelism divides FLOPs, ring traffic, merging of block outputs and offload copies by tp, but not latencies
    and measured fixed times. It adds collectives (collectives.py), which nothing hides. Pipeline stages, each with a
    part of the layers, are accounted for in planner/time/makespan.py.
    """
    model, tp = config.model, config.parallel.tp
    b, w = element_bytes(config.dtype)
    linear = token_seconds(model, tp, rates)  # seconds of a token in linear layers, forward
    attention = flops.attention(model)
    every = sum(one.flops for one in attention)
    windows = [one for one in attention if one.window < flops.WHOLE]
    if len(windows) > 1:
        raise ValueError("the layers of a model may have attention windows of one size only")
    pair = every / tp / rates.attention_flops_per_s
    inside = tp <= min(node.devices for node in cluster.nodes)
    # Collectives are slower than messages: on CPUs they reach about a fourth of the rate.
    link = rates.reduce_bytes_per_s if inside else min(rates.reduce_bytes_per_s, rates.network_bytes_per_s)
    sent_f, sent_b = (sent / link for sent in tensor_collectives(config))
    # Blocks of consecutive ranks share experts.
    near = config.parallel.ep <= min(node.devices for node in hdp.nodes)
    between = rates.node_bytes_per_s if near else min(rates.node_bytes_per_s, rates.network_bytes_per_s)
    shared_f, shared_b = (sent / between for sent in expert_collectives(config))
    # Tiles of SwiGLU and of experts keep only their input, so the backward pass computes them again in any case.
    tiled = ffn_share(model, rates) if config.mlp_tile else 0.0
    recomputed = {"none": tiled, "layer": 1.0, "layer_keep_attention": 1.0}[config.recompute]
    # Seconds in which the K,V of a token make one hop inside a node, per byte of an element. Hops between nodes take
    # `inter_node_slowdown` times as long.
    kv = 2 * model.layers * model.kv_heads * model.head_dim / tp / rates.node_bytes_per_s
    # Two layers stay (equation 3). With two or fewer nothing is copied, but callers divide by the rate.
    copied_part = max(1, model.layers - 2) / model.layers
    saved = activations.layers_bytes(model, flops.kinds(model), config.dtype, config.recompute, config.mlp_tile)
    copied = copied_part * saved / tp / rates.copy_bytes_per_s
    slowdown = rates.node_bytes_per_s / rates.network_bytes_per_s if len(hdp.nodes) > 1 else 1.0
    # A micro-batch reads all weights once, however few tokens it has. That takes as long as the products of
    # `half_tokens` tokens, in the backward pass `linear_backward` times as long.
    fixed = rates.half_tokens * linear * (1 + rates.linear_backward)
    merged = 3 * w * model.layers * model.heads * model.head_dim / tp  # bytes per token: read twice, written once
    return Rates(
        token_f=NS * (linear + sent_f + shared_f),
        token_b=NS * ((rates.linear_backward + recomputed) * linear + sent_b + shared_b),
        pair_f=NS * pair,
        pair_b=NS * rates.attention_backward * pair,
        micro=NS * (fixed + rates.micro_batch_s + model.layers * rates.layer_s),
        sequence=NS * model.layers * rates.sequence_s,
        round=NS * model.layers * rates.round_s,
        ring=NS * model.layers * rates.ring_s,
        merge=NS * merged / rates.merge_bytes_per_s,
        latency=NS * model.layers * rates.latency_s,
        kv=NS * kv * b,
        dkv=NS * kv * w,
        query=NS * kv * b * model.heads / (2 * model.kv_heads),
        result=NS * kv * w * model.heads / (2 * model.kv_heads),
        inter_node_slowdown=max(1.0, slowdown),
        overlap=rates.overlap,
        recompute_factor=1.0 if config.recompute == "layer" else 0.0,
        # Only pipelines cut sequences into slices, whose rounds would be too short without teams. Rings in teams of c
        # have up to 4 c peers (planner/planners.py).
        team=max(1, min(_LARGEST_TEAM, config.planner.max_peers // 4)) if config.parallel.pp > 1 else 1,
        copy=NS * copied,
        rounds_per_call=rounds_per_call(config.parallel.pp),
        window=float(windows[0].window if windows else flops.WHOLE),
        windowed=sum(one.flops for one in windows) / every,
    )


def _nanoseconds(forward: float, backward: float) -> tuple[int, int]:
    return round(NS * max(0.0, forward)), round(NS * max(0.0, backward))


def _buckets(config: Config, ranks: int) -> int:
    """Buckets of a device's gradients."""
    count = parameters(config.model) / (config.parallel.tp * config.parallel.pp)
    return math.ceil(count / bucket_elements(config, ranks))


def _latency(config: Config, rates: Calibration, ranks: int) -> float:
    """Seconds of the hops in which all buckets are reduced, or gathered, once; 0 in stage 3, which has `gather_s`.

    A hop takes `latency_s`, as a message does. That is an upper bound: NCCL's model of a hop inside a node has a third
    (datasheets.py).
    """
    return _buckets(config, ranks) * hops(ranks) * rates.latency_s if config.zero.stage < 3 else 0.0


def _update_seconds(config: Config, rates: Calibration, hdp: Cluster) -> float:
    """Seconds in which a device updates its part of the weights, and gathers all of them.

    The weights of a bucket are gathered while the next bucket is updated, so all but one bucket of the shorter is
    hidden. The norm of all gradients comes first.
    """
    count = parameters(config.model) / (config.parallel.tp * config.parallel.pp)
    # The memory of a host is assumed to be as fast as copies to it.
    speed = rates.copy_bytes_per_s if config.optimizer.on_host else rates.memory_bytes_per_s
    first, update = (count / hdp.ranks * each / speed for each in update_bytes(config.optimizer, config.dtype))
    gather = collectives(config, hdp.ranks).gather / _reduce_rate(config, rates, hdp)
    gather += _latency(config, rates, hdp.ranks)
    return first + max(update, gather) + min(update, gather) / _buckets(config, hdp.ranks)


def _reduce_rate(config: Config, rates: Calibration, hdp: Cluster) -> float:
    """Bytes/s of a reduction or a gather over all HDP ranks: the rate inside a node, at most that of its network cards.

    NCCL runs as many rings side by side as a node has cards. Each ring visits all ranks of a node before it leaves
    through its own card, so the cards together carry the bytes of one rank. The groups of other tp ranks, and of other
    shares of experts, send at the same time through the same cards.
    """
    if len(hdp.nodes) == 1:
        return rates.reduce_bytes_per_s
    members = min(node.devices for node in hdp.nodes)
    cards = min(rates.nics_per_node / config.parallel.tp, members) / min(config.parallel.ep, members)
    return min(rates.reduce_bytes_per_s, cards * rates.network_bytes_per_s)
