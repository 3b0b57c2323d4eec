"""What keeps experts equally busy, so that it does not depend on how sequences were packed or cut.

Letters: T tokens of this rank, S shards of sequences that they belong to, L layers, E experts, k experts of a token.

Balance loss of a sequence s of n tokens, in a layer: E * sum_i f_i P_i, with f_i the share of its n k slots that expert
i got, and P_i the mean of the router's probability for i over its tokens; 1 when balanced (Fedus et al. 2021, section
2.2, by sequence and not by batch). Sequences count by their loss tokens, layers add up. f has no gradient, so a rank
needs no more of its ring than its counts:

    loss tokens(s) * E * sum_i f_i P_i = sum over tokens t of s, i: weight(s, i) p_i(t)
    weight(s, i) = loss tokens(s) * E * count(s, i) / (k n^2)

of which each rank takes its own tokens t.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention.meeting import Meeting
from engine.data.slices import IGNORE
from engine.models.llama.layers import Routed
from engine.models.mixtral.experts import slot_counts


def z_loss(routed: Sequence[Routed], labels: Tensor) -> Tensor:
    """Return the sum over layers and loss tokens of logsumexp(router logits)^2 (Zoph et al. 2022, equation 5)."""
    logits = torch.stack([layer.logits for layer in routed])  # [L,T,E]
    return (logits.logsumexp(-1).square() * (labels != IGNORE)).sum()


def expert_slots(routed: Sequence[Routed], meeting: Meeting) -> Tensor:
    """Return how many slots of each of this rank's shards every expert of every layer got: int64 [S,L,E]."""
    chosen, owner = torch.stack([layer.chosen for layer in routed]), _owner(meeting, routed[0].chosen.device)
    layers, experts = len(routed), routed[0].logits.shape[-1]
    layer = torch.arange(layers, device=owner.device)[:, None, None]
    places = (owner[:, None] * layers + layer) * experts + chosen[:, : len(owner)]  # [L,T,k]
    size = len(meeting.shards) * layers * experts
    return slot_counts(places.flatten(), size).view(-1, layers, experts)


def balance_loss(routed: Sequence[Routed], slots: Tensor, labels: Tensor, meeting: Meeting) -> Tensor:
    """Return this rank's share of the balance loss, summed over sequences and layers, of its slots [S,L,E].

    All ranks of a ring call it at once: counts travel around it, and how many loss tokens the sequence has.
    """
    owner, experts = _owner(meeting, labels.device), slots.shape[-1]
    counted = (labels[: len(owner)] != IGNORE).long()
    loss_tokens = slots.new_zeros(len(slots)).scatter_add_(0, owner, counted)
    totals = meeting.summed(torch.cat((slots.flatten(1), loss_tokens[:, None]), dim=1))
    probabilities = torch.stack([layer.logits for layer in routed]).softmax(-1)  # [L,T,E]
    totals = totals.to(probabilities.dtype)
    length = totals.new_tensor([shard.length for shard in meeting.shards])
    share = totals[:, -1] * experts / (routed[0].chosen.shape[-1] * length**2)  # [S]
    weight = (totals[:, :-1] * share[:, None]).view(slots.shape)  # [S,L,E]
    return (weight[owner].transpose(0, 1) * probabilities[:, : len(owner)]).sum()


def _owner(meeting: Meeting, device: torch.device) -> Tensor:
    """Return the shard of each token, [T]; none in an idle micro-batch, whose tokens count for nothing."""
    sizes = torch.tensor([shard.stop - shard.start for shard in meeting.shards], dtype=torch.int64)
    return torch.arange(len(sizes)).repeat_interleave(sizes).to(device)
