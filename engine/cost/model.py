"""What planner, simulator and memory estimate know of a model and a machine. Frozen, equal on every rank.

Times are whole nanoseconds; they come from rates (calibration.py) by arithmetic alone, so no measured time of a run
enters a plan. Memory and traffic are whole bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.cluster.cluster import Cluster
from engine.config.schema import Config
from engine.cost import activations, calibration, flops
from engine.cost.activations import Moment
from engine.cost.calibration import Calibration
from engine.cost.datasheets import nominal
from engine.cost.states import (
    closing_bytes,
    element_bytes,
    filling_bytes,
    parameters,
    passing_bytes,
    states,
    update_bytes,
)
from engine.cost.times import Rates, wholes

Ints = NDArray[np.int64]
PPM = 1_000_000  # offload ratios are parts per million: plans are integers
NS = 1e9


@dataclass(frozen=True)
class Costs:
    """Seconds (as nanoseconds), FLOPs and bytes of one HDP rank: d_tp x d_pp devices, counted a device."""

    source: str  # where the rates come from
    parameters: int
    layers: int
    linear_flops: int  # forward, a token
    attention_flops: int  # forward, a (query, key) pair
    peak_flops_per_s: float  # of one device, by its data sheet: what MFU is a share of
    devices: int  # of one HDP rank
    rates: Rates
    nics: float  # network cards of a node, for each of a rank's d_tp devices
    slot: int  # ns that a lockstep slot takes beside its micro-batch: weights are gathered
    step: int  # ns of a step beside its micro-batches: gradients reduced, weights updated
    token_bytes: int  # what layers save of a token
    moments: tuple[Moment, ...]  # beside those: a layer's backward pass, then the loss
    ring_bytes: int  # ring buffers, a token of a ring's largest shard
    fixed_bytes: int  # model states, a rank
    passing_bytes: int  # gradients that replace saved activations during the backward pass, a rank
    forward_hop_bytes: int  # K,V of a token in all layers, sent once
    backward_hop_bytes: int  # dK,dV of a token in all layers, sent once
    forward_rings: int  # passes in which K,V travel: 2, or 3 if the forward one is run again
    counts_bytes: int  # what a shard's experts got in all layers, sent once for each hop of the counts' rounds
    host_fixed_bytes: int = 0  # model states that wait on the host, a rank
    closing_bytes: int = 0  # what the end of a step holds when activations are gone, a rank
    filling_bytes: int = 0  # of the states: gradients that a rank's first micro-batch of a step fills

    @classmethod
    def of(cls, config: Config, rates: Calibration | None = None) -> Costs:
        """Return the costs of a config, on the machine that it names or on one of these rates.

        Its model states are sharded over all ranks of its cluster.

        Raises ConfigError for a calibration that cannot be used.
        """
        cluster = Cluster.of(config.cluster, config.parallel)
        rates = rates or machine(config)
        model, dtype, tp = config.model, config.dtype, config.parallel.tp
        b, w = element_bytes(dtype)
        kv_elements = 2 * model.layers * model.kv_heads * model.head_dim
        devices = tp * config.parallel.pp
        return cls(
            source=f"{rates.device} ({rates.source})",
            parameters=parameters(model),
            layers=model.layers,
            linear_flops=flops.linear_flops(model),
            attention_flops=flops.attention_flops(model),
            peak_flops_per_s=rates.peak_flops_per_s,
            devices=devices,
            rates=rates_of(config, rates, cluster),
            nics=rates.nics_per_node / tp,  # each of a rank's devices sends its part
            slot=round(NS * _slot_seconds(config, rates, devices, cluster)),
            step=round(NS * _step_seconds(config, rates, devices, cluster)),
            forward_hop_bytes=kv_elements * b,
            backward_hop_bytes=kv_elements * w,
            forward_rings=3 if config.recompute == "layer" else 2,
            counts_bytes=activations.counts_bytes(model) if config.balance.by == "loss" else 0,
            **_bytes(config, cluster.ranks),
        )

    def among(self, config: Config, ranks: int) -> Costs:
        """Return the same costs with the bytes of the config on so many HDP ranks; times stay what they are."""
        return replace(self, **_bytes(config, ranks))

    @property
    def fixed(self) -> int:
        """Return the ns of a micro-batch, however small."""
        return round(self.rates.micro)

    def sequence(self, lengths: Ints) -> Ints:
        """Return the time of uncut sequences, ns: the useful work, which every ring shares out and none makes less."""
        return wholes(self.rates, np.ascontiguousarray(lengths, dtype=np.int64))

    def flops(self, lengths: Ints) -> int:
        """Return the model FLOPs of a step of these sequences, forward and backward."""
        tokens = int(lengths.sum())
        pairs = sum(length * (length + 1) // 2 for length in lengths.tolist())
        return flops.PASSES * (self.linear_flops * tokens + self.attention_flops * pairs)

    def peak_bytes(self, tokens: Ints, ring_tokens: Ints, offload: Ints | int = 0, first: Any = False) -> Ints:
        """Return the peak memory of a rank in a micro-batch of `tokens`, of which `offload` ppm go to the host.

        `ring_tokens` are those of the largest shard of each ring of two or more in it, summed: the buffers' size.
        `first`, a flag or an array of them, says that it is its rank's first of the step. The end of the step, when
        activations are gone, may hold more than any.
        """
        during = self.fullest(tokens, offload, first) + self.ring_bytes * ring_tokens
        return self.fixed_bytes + np.maximum(during, self.closing_bytes)

    def fullest(self, tokens: Ints, offload: Ints | int, first: Any = False) -> Ints:
        """Return the most that a micro-batch holds of what layers save, of gradients that pass and of the rest.

        All activations and no gradient when the backward pass begins, all gradients when it ends, and just before that
        two layers, also those that were offloaded, and the gradients of the others. It is less by the gradients that a
        first micro-batch still has to fill.
        """
        left, layer = min(2, self.layers), self.moments[0].of(tokens)
        fill = np.where(first, self.filling_bytes, 0)
        begins = self.token_bytes * self.resident(tokens, offload) + self.working(tokens) - fill
        two = -(-self.token_bytes * left * tokens // self.layers)  # exact: `most_tokens` relies on it
        others = (self.layers - left) * self.passing_bytes // self.layers
        two_left = two + others + layer - fill * left // self.layers
        return np.maximum(np.maximum(begins, two_left), self.passing_bytes + layer)

    def working(self, tokens: Any) -> Any:
        """Return what a micro-batch of `tokens`, a number or an array of them, holds beside what its layers save."""
        return reduce(np.maximum, (moment.of(tokens) for moment in self.moments))

    def resident(self, tokens: Ints, offload: Ints | int) -> Ints:
        """Return how many tokens' saved activations stay: those of two layers, and 1 - r of the others (equation 3)."""
        if self.layers <= 2:
            return np.asarray(tokens)
        stays = 2 * PPM + (PPM - np.asarray(offload, dtype=np.int64)) * (self.layers - 2)
        return -(-tokens * stays // (self.layers * PPM))

    def host_bytes(self, tokens: Ints, offload: Ints | int) -> Ints:
        """Return the bytes of a micro-batch that wait on the host."""
        return self.token_bytes * (tokens - self.resident(tokens, offload))

    def most_tokens(self, device_memory: int) -> int:
        """Return the most tokens of a micro-batch, all of them in rings, that fit the device; 0 if none do.

        When two layers are left (`fullest`) there is never more than at the beginning or at the end: it is between.
        """
        free, saved = device_memory - self.fixed_bytes, self.token_bytes + self.ring_bytes
        if free < self.closing_bytes:
            return 0
        most = [moment.most(free, saved) for moment in self.moments]
        most.append(self.moments[0].most(free - self.passing_bytes, self.ring_bytes))
        return max(0, min(most))

    def seconds(self, ns: float) -> float:
        """Return nanoseconds as seconds."""
        return ns / NS


def _bytes(config: Config, ranks: int) -> dict[str, Any]:
    """Return the fields of `Costs` that say what a device of one of `ranks` HDP ranks holds."""
    model, dtype, mode, tile = config.model, config.dtype, config.recompute, config.mlp_tile
    tp, held = config.parallel.tp, states(config, ranks)
    return {
        "token_bytes": -(-activations.layers_bytes(model, dtype, mode, tile) // tp),
        "moments": activations.moments(config),
        "ring_bytes": -(-activations.ring_bytes(model, dtype) // tp) if ranks > 1 else 0,
        "fixed_bytes": held.device,
        "passing_bytes": passing_bytes(config),
        "closing_bytes": closing_bytes(config, ranks),
        "filling_bytes": filling_bytes(config, ranks),
        "host_fixed_bytes": held.host,
    }


def machine(config: Config) -> Calibration:
    """Return the measured rates of the config's cluster, or those of its data sheet."""
    path = config.cluster.calibration
    return nominal(config.cluster.name) if path is None else calibration.read(Path(path), config.cluster.name)


def rates_of(config: Config, rates: Calibration, cluster: Cluster) -> Rates:
    """Return a calibration as nanoseconds of this model on one HDP rank.

    Tensor parallelism divides everything by d_tp and adds, in each layer, two sums of a token's hidden state over the
    d_tp devices in each pass; stages of a pipeline each hold a part of the layers (simulator).
    """
    model, tp = config.model, config.parallel.tp
    b, w = element_bytes(config.dtype)
    linear = flops.linear_flops(model) / tp / rates.linear_flops_per_s
    pair = flops.attention_flops(model) / tp / rates.attention_flops_per_s
    inside = tp <= min(node.slots for node in Cluster.of(config.cluster).nodes)
    link = rates.node_bytes_per_s if inside else min(rates.node_bytes_per_s, rates.network_bytes_per_s)
    sums = 4 * model.layers * model.hidden * b * (tp - 1) / tp / link
    tiled = flops.ffn_share(model) if config.mlp_tile else 0.0
    again = {"none": tiled, "layer": 1.0, "layer_keep_attention": 1.0}[config.recompute]
    kv = 2 * model.layers * model.kv_heads * model.head_dim / tp / rates.node_bytes_per_s
    # Two layers stay (equation 3). Of two layers or fewer nothing goes; a rate is only there to be divided by.
    goes = max(1, model.layers - 2) / model.layers
    saved = activations.layers_bytes(model, config.dtype, config.recompute, config.mlp_tile)
    copied = goes * saved / tp / rates.copy_bytes_per_s
    forward, backward = linear + sums, rates.linear_backward * linear + sums
    fixed = rates.half_tokens * linear * (1 + rates.linear_backward)
    merged = 3 * w * model.layers * model.heads * model.head_dim / tp  # read twice, written once
    return Rates(
        token_f=NS * forward,
        token_b=NS * (backward + again * forward),
        pair_f=NS * pair,
        pair_b=NS * rates.attention_backward * pair,
        micro=NS * (fixed + rates.micro_batch_s + model.layers * rates.layer_s),
        sequence=NS * model.layers * rates.sequence_s,
        round=NS * model.layers * rates.round_s,
        merge=NS * merged / rates.merge_bytes_per_s,
        latency=NS * model.layers * rates.latency_s,
        kv=NS * kv * b,
        dkv=NS * kv * w,
        far=max(1.0, rates.node_bytes_per_s / rates.network_bytes_per_s) if len(cluster.nodes) > 1 else 1.0,
        overlap=rates.overlap,
        again=1.0 if config.recompute == "layer" else 0.0,
        copy=NS * copied,
    )


def _slot_seconds(config: Config, rates: Calibration, devices: int, cluster: Cluster) -> float:
    """Return the gathers of a slot that computing does not hide: ZeRO-3 gathers all weights, forward and backward.

    They run one layer ahead of the computing; what is counted is one layer's gather a pass, which nothing precedes.
    """
    if config.zero.stage < 3:
        return 0.0
    b, _ = element_bytes(config.dtype)
    weights = parameters(config.model) * b / devices
    return 2 * weights / config.model.layers / _reduce_rate(rates, cluster)


def _step_seconds(config: Config, rates: Calibration, devices: int, cluster: Cluster) -> float:
    """Return the reduction of gradients (a reduce-scatter and a gather of weights) and the update of a rank's share."""
    b, w = element_bytes(config.dtype)
    ranks, count = cluster.ranks, parameters(config.model) / devices
    travel = (ranks - 1) / ranks * count * (w + b) / _reduce_rate(rates, cluster)
    # A host's memory is taken to be as fast as copies to it.
    speed = rates.copy_bytes_per_s if config.optimizer.on_host else rates.memory_bytes_per_s
    update = count / ranks * update_bytes(config.optimizer, config.dtype) / speed
    return rates.step_s + travel + update


def _reduce_rate(rates: Calibration, cluster: Cluster) -> float:
    """Return the bytes/s of a reduction or a gather over all HDP ranks: as in a node, or what a network card lets."""
    one_node = len(cluster.nodes) == 1
    return rates.reduce_bytes_per_s if one_node else min(rates.reduce_bytes_per_s, rates.network_bytes_per_s)
