"""What the planner knows of a model and a machine: a handful of integers, equal on every rank and after every restart.

Costs are in units of `flops.UNIT` floating-point operations; no measured time of a run enters a plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.cluster.cluster import Cluster
from engine.config.schema import Config
from engine.cost import flops, memory, rates

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Costs:
    """Work in cost units, memory and traffic in bytes."""

    parameters: int
    linear: int  # units a token
    attention: int  # units a (query, key) pair
    fixed: int  # units a micro-batch, however small
    token_bytes: int  # saved activations, a token
    working_bytes: int  # logits or a layer's backward pass, a token
    ring_bytes: int  # ring buffers, a token of a ring's largest shard
    fixed_bytes: int  # model states, a rank
    passing_bytes: int  # gradients that replace saved activations during the backward pass, a rank
    forward_hop_bytes: int  # K,V of a token in all layers, sent once
    backward_hop_bytes: int  # dK,dV of a token in all layers, sent once
    flops_per_s: int  # nominal

    @classmethod
    def of(cls, config: Config) -> Costs:
        """Return the costs of a config; its model states are sharded over all ranks of its cluster."""
        model, dtype = config.model, config.dtype
        ranks = Cluster.of(config.cluster).ranks
        b, w = memory.element_bytes(dtype)
        kv_elements = 2 * model.layers * model.kv_heads * model.head_dim
        linear = flops.linear_units(model)
        return cls(
            parameters=memory.parameters(model),
            linear=linear,
            attention=flops.attention_units(model),
            fixed=flops.FIXED_TOKENS * linear,
            token_bytes=memory.saved_bytes(model, dtype),
            working_bytes=memory.working_bytes(model, dtype),
            ring_bytes=memory.ring_bytes(model, dtype),
            fixed_bytes=memory.state_bytes(model, dtype, ranks),
            passing_bytes=memory.passing_bytes(model, dtype),
            forward_hop_bytes=kv_elements * b,
            backward_hop_bytes=kv_elements * w,
            flops_per_s=rates.flops_per_s(config.cluster.name),
        )

    def work(self, tokens: Ints, pairs: Ints) -> Ints:
        """Return the cost of `tokens` whose queries meet `pairs` keys in all."""
        return self.linear * tokens + self.attention * pairs

    def sequence(self, lengths: Ints) -> Ints:
        """Return the cost of whole sequences: token p meets p + 1 keys, so s(s + 1) / 2 pairs."""
        lengths = np.asarray(lengths, dtype=np.int64)
        return self.work(lengths, lengths * (lengths + 1) // 2)

    def peak_bytes(self, tokens: Ints, ring_tokens: Ints) -> Ints:
        """Return the peak memory of a rank in a micro-batch of `tokens`.

        `ring_tokens` are those of the largest shard of each ring of two or more in it, summed: the buffers' size.
        """
        saved = np.maximum(self.token_bytes * tokens, self.passing_bytes)
        return self.fixed_bytes + saved + self.working_bytes * tokens + self.ring_bytes * ring_tokens

    def most_tokens(self, device_memory: int) -> int:
        """Return the most tokens of a micro-batch, all of them in rings, that fit the device; 0 if none do."""
        free = device_memory - self.fixed_bytes
        beside = self.working_bytes + self.ring_bytes
        return max(0, min(free // (self.token_bytes + beside), (free - self.passing_bytes) // beside))

    def seconds(self, units: float) -> float:
        """Return the nominal time of `units` on one rank."""
        return units * flops.UNIT / self.flops_per_s
