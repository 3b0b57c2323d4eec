"""The transformer of all families: single-device code on packed tokens, whose layers are those that its family lists.

LLaMA (Touvron et al. 2023) with grouped-query attention as in LLaMA 2; Mixtral (Jiang et al. 2024), a mixture of
experts; Qwen3 (Yang et al. 2025), dense or with experts, which normalises queries and keys.

`engine/models/parallelize.py` adds recompute, offload, tiles and compiled operations; rings come with the attention
context of each micro-batch.

Letters: T tokens, C hidden size, H query heads, G key and value heads, D head size, V vocabulary, L layers with
experts, E experts, S sequences (or shards of them).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.config.schema import Balance, Model
from engine.family.families import family_of
from engine.models.common.attention import Attention, LocalAttention, PackedAttention
from engine.models.common.loss import Head
from engine.models.common.norm import RMSNorm
from engine.models.common.part import Between, Part, Rows
from engine.models.common.rope import Rotation, rotary_embedding
from engine.models.common.skip_init import Embedding
from engine.models.common.swiglu import FeedForward
from engine.models.experts.balance import expert_counts, load_balancing_loss, z_loss
from engine.models.experts.layer import Experts, Routed


class Layer(nn.Module):
    """One pre-norm transformer layer, with `ffn` for its feed-forward part."""

    def __init__(self, shape: Model, part: Part, ffn: FeedForward | Experts) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.attention = Attention(shape, part.tp, family_of(shape).qk_norm)
        self.ffn_norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.ffn = ffn

    def forward(self, x: Tensor, rotation: Rotation, attention: PackedAttention) -> tuple[Tensor, Routed | None]:
        """Compute the residual stream [T,C] after the layer, and the decisions of its router; None without experts."""
        return self.after_attention(x, attention(*self.before_attention(x, rotation)))

    # The layer is split into two methods, so that recompute can save the tensors between them (recompute.py).

    def before_attention(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Compute q [T,H,D], k and v [T,G,D] from the residual stream x [T,C]."""
        return self.attention.project(self.attention_norm(x), rotation)

    def after_attention(self, x: Tensor, attended: Tensor) -> tuple[Tensor, Routed | None]:
        """Compute the rest of the layer from its input x [T,C] and the output of attention [T,H,D]."""
        x = x + self.attention.output(attended)
        out = self.ffn(self.ffn_norm(x))
        out, routed = out if isinstance(self.ffn, Experts) else (out, None)
        return x + out, routed


@dataclass
class Tally:
    """Metrics summed over the micro-batches of a step on this rank; 0 before the first one."""

    cross_entropy: Tensor | float = 0.0  # summed over loss tokens, nats
    expert_counts: Tensor | int = 0  # [L,E] tokens per expert, of the layers of the part


class Decoder(nn.Module):
    """A model of the given shape, or a part of it. Its weights are uninitialised: call `initialise` or load them
    before use.

    Layers are numbered as in the whole model. With tied weights, a part with the head but without the embedding has a
    copy of the tied weight, named `head.weight`.

    `balance` configures how the load of the experts is balanced in training; None adds nothing to the cross-entropy.
    """

    rows = Rows()  # tensor parallelism replaces it

    def __init__(self, shape: Model, balance: Balance | None = None, part: Part | None = None) -> None:
        super().__init__()
        part, kinds = part or Part.whole(shape), family_of(shape).layers(shape)
        self.shape, self.part, self.balance, self.tally = shape, part, balance, Tally()
        # The numbers of all layers with experts, also those of other parts.
        has_experts = [kind.experts for kind in kinds for _ in range(kind.count)]
        self.routed_layers = [number for number in range(shape.layers) if has_experts[number]]
        self.run_layer: Callable[..., Any] = nn.Module.__call__  # parallelize.py wraps it
        self.embedding = Embedding(part.vocab_rows(shape), shape.hidden) if part.first else None
        self.layers = nn.ModuleDict()
        for number in part.layers:
            routed = has_experts[number]
            ffn = Experts(shape, balance, part.tp, part.ep) if routed else FeedForward(shape, part.tp)
            self.layers[str(number)] = Layer(shape, part, ffn)
        self.norm = RMSNorm(shape.hidden, shape.norm_eps) if part.last else None
        self.head = Head(shape.hidden, part.vocab_rows(shape)) if part.last else None
        if shape.tied and self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        labels: Tensor | None = None,
        attention: PackedAttention | None = None,
    ) -> Tensor | Between:
        """Compute the logits [T,V] of packed tokens [T]; with `labels` [T], their summed loss in nats instead.

        `positions` [T] count from 0 within each sequence. Labels equal to `IGNORE` are ignored. If `attention`
        is None, every sequence is assumed to be complete on this device.

        In training the loss of a model with experts includes terms that balance them. Summed over ranks and
        micro-batches and divided by the loss tokens of the step, it is

            cross-entropy + loss_weight * load balancing loss + z_weight * z-loss

        where each term is a mean over loss tokens. The load balancing loss is added only with `balance.by=loss`, and
        neither term if `balance` is None.

        A part without the embedding takes the residual stream [R,C] of the part before it in place of `tokens`; one
        without the head returns it as `Between`, with the balancing terms of its layers if there are `labels`. R is T,
        or the rows of one device under tensor parallelism. The loss is the same on all devices of a tp group.
        """
        # A stage of a pipeline runs the same code on its part: a part without the head has no loss, and returns its
        # output.
        attention = LocalAttention(positions) if attention is None else attention
        x, routed = self.hidden(tokens, positions, attention)
        loss: Tensor | None = None
        if self.head is not None and self.norm is not None:
            loss = self.head(self.norm(x), labels)
        balancing = None
        # Balancing terms are for training only; a validation loss is the cross-entropy alone. The metric
        # `cross_entropy` excludes these terms, so it is tallied before they are added. A part without the head cannot
        # add its terms to a loss, so it passes them on.
        if labels is not None and self.balance is not None and self.training:
            if loss is not None and self.routed_layers:
                self.tally.cross_entropy = self.tally.cross_entropy + loss.detach().double()
            if routed:
                balancing = self._balancing(routed, labels, attention, self.balance)
        if loss is None:
            return Between(x, balancing)
        return loss if balancing is None else loss + balancing

    def _balancing(self, routed: list[Routed], labels: Tensor, attention: PackedAttention, balance: Balance) -> Tensor:
        """Compute the terms of the loss that balance the experts, a scalar, and count the tokens of each expert."""
        shards, own = attention.shards(labels.device), self.rows.own(len(labels))
        counts = self.rows.sum(expert_counts(routed, shards, own))
        self.tally.expert_counts = self.tally.expert_counts + counts.sum(0)
        share = balance.z_weight * z_loss(routed, labels[own])
        if balance.by == "loss":
            total = load_balancing_loss(routed, counts, labels, shards, own, attention)
            share = share + balance.loss_weight * total
        return self.rows.total(share)

    def hidden(self, tokens: Tensor, positions: Tensor, attention: PackedAttention) -> tuple[Tensor, list[Routed]]:
        """Compute the residual stream [R,C] after the last layer, and the router decisions of layers with experts."""
        x = tokens if self.embedding is None else self.embedding(tokens)
        rotation, routes = rotary_embedding(positions, self.shape, x.dtype), []
        for number, layer in self.layers.items():
            x, routed = self.run_layer(layer, x, rotation, attention.at(int(number)))
            if routed is not None:
                routes.append(routed)
        return x, routes

    @torch.no_grad()
    def end_step(
        self, sum_over_ranks: Callable[[Tensor], Tensor], loss_tokens: int, updated: bool = True
    ) -> dict[str, float]:
        """Update the biases of experts from their tokens in this step, and reset the tally.

        With `balance.by=bias`, the bias of an expert with more tokens than the mean decreases by one unit; with fewer
        tokens it increases by one. Returns the metrics `cross_entropy`, the mean over loss tokens, and
        `busiest_expert`, the largest load of an expert in any layer divided by the mean load; no metrics if `balance`
        is None, or without experts. If the step was not `updated`, because its loss is not finite, biases stay and
        there are no metrics.

        Collective: all ranks must call it, each after at least one micro-batch. `sum_over_ranks` sums a tensor over all
        HDP ranks and stages; `loss_tokens` is the step's total.
        """
        tally, experts, own, self.tally = self.tally, self.shape.experts, self.experts(), Tally()
        ran = isinstance(tally.expert_counts, Tensor) or not own
        if not updated or self.balance is None or not self.routed_layers or not ran:
            return {}
        # One sum for all layers and the cross-entropy: float64 holds integers up to 2^53 exactly.
        device = next(self.parameters()).device
        sums = torch.zeros(len(self.routed_layers) * experts + 1, dtype=torch.float64, device=device)
        first = sum(number < self.part.layers.start for number in self.routed_layers)
        if own:
            sums[:-1].view(-1, experts)[first : first + len(own)] = tally.expert_counts
        sums[-1] = tally.cross_entropy
        sums = sum_over_ranks(sums)
        tokens = sums[:-1].view(-1, experts)
        load = tokens * experts / tokens.sum(-1, keepdim=True)
        for of_layer, load_of_layer in zip(own, load[first : first + len(own)], strict=True):
            if of_layer.bias is not None:
                of_layer.bias += torch.sign(1 - load_of_layer).long()
        return {"cross_entropy": float(sums[-1]) / loss_tokens, "busiest_expert": float(load.max())}

    def experts(self) -> list[Experts]:
        """The `Experts` modules, in the order of the layers."""
        return [module for module in self.modules() if isinstance(module, Experts)]
