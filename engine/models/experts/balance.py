"""Losses that balance the load of experts, independent of how sequences are packed or sharded.

Letters: T tokens of this rank, S shards that they belong to, L layers, E experts, k experts per token.

The load balancing loss of a sequence s of n tokens, in one layer, is E * sum_i f_i P_i. Each token chooses k experts:
f_i is the fraction of these n * k choices that chose expert i, and P_i is the mean over tokens of the router's
probability of i. A perfect balance gives 1 (Fedus et al. 2021, section 2.2, but per sequence instead of per batch). The
losses of sequences are weighted by their loss tokens, and the losses of layers are added. f has no gradient. So the
loss is a sum over tokens, and a rank needs only the expert counts of the other shards of its sequences:

    loss tokens(s) * E * sum_i f_i P_i = sum over tokens t of s, i: weight(s, i) p_i(t)
    weight(s, i) = loss tokens(s) * E * count(s, i) / (k n^2)

Under tensor parallelism the tokens of a rank are divided among its devices. Each device computes the sum over its own
tokens, `own`, with the expert counts of all devices. Rows of the router after these tokens are padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.data.inputs import IGNORE
from engine.models.common.attention import PackedAttention, Shards, SliceOfShard
from engine.models.experts.layer import Routed, count_each


def z_loss(routed: Sequence[Routed], labels: Tensor) -> Tensor:
    """Compute the sum of logsumexp(router logits)^2 over layers and loss tokens (Zoph et al. 2022, equation 5).

    `routed` are the router decisions of each layer, for the T tokens of `labels` and maybe padding. Returns a scalar.
    """
    logits = torch.stack([layer.logits[: len(labels)] for layer in routed])  # [L,T,E]
    return (logits.logsumexp(-1).square() * (labels != IGNORE)).sum()


def expert_counts(routed: Sequence[Routed], shards: Shards, own: slice) -> Tensor:
    """Count the tokens `own` that each expert of each layer got from each shard of this rank: int64 [S,L,E]."""
    ids, layers, experts = shards.ids[own], len(routed), routed[0].logits.shape[-1]
    chosen = torch.stack([layer.chosen for layer in routed])[:, : len(ids)]  # [L,T,k]
    layer = torch.arange(layers, device=ids.device)[:, None, None]
    places = (ids[:, None] * layers + layer) * experts + chosen
    counts = count_each(places.flatten(), len(shards.lengths) * layers * experts)
    return counts.view(-1, layers, experts)


def load_balancing_loss(
    routed: Sequence[Routed],
    counts: Tensor,
    labels: Tensor,
    shards: Shards,
    own: slice,
    attention: PackedAttention,
) -> Tensor:
    """Compute the part of the tokens `own` in the load balancing loss: a scalar.

    The losses of sequences, times their loss tokens, are summed over sequences and layers.
    `counts` [S,L,E] is the result of `expert_counts`, summed over devices; `labels` are those of all tokens.
    Collective, because counts are summed over the shards of each sequence: all ranks of a ring must call this function.

    If a sequence runs in slices, its counts are known after the last one. So the last slice returns the loss of all of
    them, and the earlier ones 0; in the backward pass each one has its own gradient.
    """
    ids, experts = shards.ids, counts.shape[-1]
    # Counts and loss tokens are summed together: one collective over the shards of each sequence instead of two.
    is_loss_token = (labels[: len(ids)] != IGNORE).long()
    loss_tokens = counts.new_zeros(len(counts)).scatter_add_(0, ids, is_loss_token)
    totals = attention.sum_over_sequences(torch.cat((counts.flatten(1), loss_tokens[:, None]), dim=1))
    # The weights of a sequence depend on the counts of all its slices, so a slice that is not the last one only adds
    # its counts to the sequence's totals.
    slices = attention.slices()
    for part in slices:
        part.totals.counts = part.totals.counts + totals[part.shard]
        totals[part.shard] = part.totals.counts if part.last else 0
    # weight(s, i) of the module's docstring.
    probabilities = torch.stack([layer.logits for layer in routed]).softmax(-1)  # [L,T,E]
    totals, lengths = totals.to(probabilities.dtype), shards.lengths.to(probabilities.dtype)
    per_count = totals[:, -1] * experts / (routed[0].chosen.shape[-1] * lengths**2)  # [S]
    weight = (totals[:, :-1] * per_count[:, None]).view(counts.shape)  # [S,L,E]
    # The terms of slices are computed apart, with weight 0 in the sum at the end: an earlier slice has no weights
    # before the last one has run, which is before any backward pass of the sequence.
    ids = ids[own]
    chosen = probabilities[:, : len(ids)]
    deferred = chosen.new_zeros(())
    for part in slices:
        if part.last:
            part.totals.weight = weight[part.shard].clone()
        weight[part.shard] = 0
        # Not a mask over `ids`, for whose size the host would wait.
        start, stop = (min(max(at - own.start, 0), len(ids)) for at in (part.rows.start, part.rows.stop))
        deferred = deferred + _OfSlice.apply(chosen[:, start:stop].sum(1), part)
    return (weight[ids].transpose(0, 1) * chosen).sum() + deferred


class _OfSlice(torch.autograd.Function):
    """The loss of a sequence, from the sums [L,E] of the probabilities of one of its slices: 0 before the last one."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, part: SliceOfShard) -> Tensor:
        totals = part.totals
        totals.probabilities = totals.probabilities + sums
        ctx.totals = totals
        return sums.new_zeros(()) if totals.weight is None else (totals.weight * totals.probabilities).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.totals.weight, None
