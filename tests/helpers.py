"""Small models, batches and steps for the tests of plan invariance, recompute, ZeRO and memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.attention.comm import RingComm
from engine.attention.kernels.choice import choose
from engine.config.load import load
from engine.config.schema import Config
from engine.data.blocks.blocks import Range, Slice
from engine.data.inputs import rank_inputs
from engine.data.sequences import SequenceTable
from engine.job import Job
from engine.models.build import build_model
from engine.models.common.norm import norm_weights
from engine.models.decoder import Decoder
from engine.models.parallelize import parallelize
from engine.offload.offload import Offload
from engine.planner.make import plan_step
from engine.trainer.optimizer import build_optimizer
from engine.trainer.step import RankContext, run_step
from engine.zero.shards import gathered, sharded

SCALE = 5.0  # of weights: a weight's change must exceed the rounding of a norm's weight, which is near 1


class FakeReader:
    """Documents made of the step's sequences, without files."""

    names = ("data",)

    def __init__(self, documents: list[np.ndarray]) -> None:
        self.documents = documents

    def tokens(
        self, source: int, block: int, document: int, start: int, stop: int, content: int | None = None
    ) -> np.ndarray:
        return self.documents[document][start:stop]

    def read(self, wanted: Sequence[Range]) -> list[Slice]:
        """Read ranges, of which all tokens count in the loss."""
        return [Slice(self.documents[one.document][one.start : one.stop], None) for one in wanted]


Batch = tuple[SequenceTable, FakeReader]


def table_of(lengths: list[int], seed: int) -> Batch:
    """A step of random documents with these lengths, each an unsplit sequence."""
    random = np.random.default_rng(seed)
    documents = [random.integers(0, 258, length + 1) for length in lengths]
    size = np.array(lengths, dtype=np.int64)
    zeros = np.zeros_like(size)
    return SequenceTable(zeros, zeros, np.arange(len(size)), zeros, size, size, zeros.astype(np.uint64)), FakeReader(
        documents
    )


def batch(world: int, capacity: int, step: int = 0) -> Batch:
    """Lengths 1, 2, primes, every length from 1 to 2D + 1, and one that needs all ranks."""
    lengths = [*range(1, 2 * world + 2), 13, 23, world * capacity - 3, 2, 31, capacity]
    lengths = [min(length, world * capacity) for length in lengths]
    return table_of(lengths, seed=1000 * world + capacity + 7 * step)


def config(world: int, capacity: int, planner: str, *more: str) -> Config:
    """A model of two layers and SGD with momentum: AdamW would hide a wrong scale of the gradients."""
    overrides = ["recipe=quickstart", f"planner={planner}", f"cluster.ranks_per_node={world}", f"capacity={capacity}"]
    model = ["layers=2", "hidden=32", "heads=4", "kv_heads=2", "ffn=48"]
    sgd = ["optimizer.name=sgd", "optimizer.betas=[0.9,0.9]", "optimizer.weight_decay=0"]
    return load([*overrides, f"context={world * capacity}", *(f"model.{m}" for m in model), *sgd, *more])


def family(experts: bool, qwen3: bool) -> list[str]:
    """Overrides that choose a family; the heads of a Qwen3 are wider than hidden size / heads."""
    name = {(False, False): "llama", (True, False): "mixtral", (False, True): "qwen3", (True, True): "qwen3_moe"}
    return [f"model.family={name[experts, qwen3]}", *(["model.head_size=12"] if qwen3 else [])]


def change_error(name: str, change: Tensor, expected: Tensor, updates: int) -> float:
    """The error of a parameter's change over some updates in float32: max|a - b| / max|b|.

    Norms of heads change so little that the rounding of a weight near 1, in each update, is not counted.
    """
    rounding = updates * 2.0**-24 if name.endswith(("q_norm.weight", "k_norm.weight")) else 0.0
    return max(0.0, float((change - expected).abs().max()) - rounding) / float(expected.abs().max())


def scale_up(parameter: Tensor) -> None:
    """Multiply the weights of a matrix by SCALE; norms stay as they are."""
    with torch.no_grad():
        parameter.mul_(SCALE if parameter.dim() > 1 else 1)


@torch.no_grad()
def draw(model: nn.Module) -> None:
    """Draw weights from one generator, in the order of the parameters; with ZeRO-3 all ranks must call it.

    Not those of `initialise`: errors of float32 depend on the draw, and tolerances were set with this one.
    """
    generator, norms = torch.Generator().manual_seed(3), norm_weights(model)
    for parameter in model.parameters():
        with gathered(parameter):
            if parameter in norms:
                parameter.fill_(1)
            else:
                parameter.copy_(torch.empty(parameter.shape).normal_(0, 0.02, generator=generator))


def llama(settings: Config, dtype: torch.dtype) -> Decoder:
    """An initialised model with large weights, prepared for rings and recompute."""
    model = Decoder(settings.model)
    parallelize(model, settings, torch.device("cpu"))
    draw(model)
    for parameter in model.parameters():
        scale_up(parameter)
    return model.to(dtype)


def mixtral(settings: Config) -> Decoder:
    """A model in float64 whose experts have unequal loads, with biases that change choices."""
    model = build_model(settings)
    draw(model)
    for parameter in model.parameters():
        scale_up(parameter)
    for experts in model.experts():
        if experts.bias is not None:
            experts.bias.copy_(torch.arange(settings.model.experts) * 3 % 7 - 3)
    return model.double()


def model_of(settings: Config, offload: Offload | None = None) -> Decoder:
    """The model of a config with large weights; with ZeRO-3 this rank holds its partition of them."""
    with sharded(settings):
        model = build_model(settings)
    parallelize(model, settings, torch.device("cpu"), offload)
    draw(model)
    for parameter in model.parameters():
        with gathered(parameter):
            scale_up(parameter)
    return model


def rank_context(dtype: torch.dtype) -> RankContext:
    """The context of this rank in a world of gloo processes."""
    device = torch.device("cpu")
    return RankContext(dist.get_rank(), device, RingComm(dist.new_group(backend="gloo")), choose(device, dtype, 8))


def deepspeed_run(settings: Config, batches: list[Batch], lr: float) -> dict[str, Any]:
    """Train some steps through DeepSpeed on this rank: the change of the fp32 weights, the norms, the largest ring."""
    from engine.zero.engine import ZeroEngine
    from tests.zero.full import masters

    dtype = torch.bfloat16 if settings.dtype == "bf16" else torch.float32
    model, context = llama(settings, torch.float32), rank_context(dtype)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine, norms, degrees = ZeroEngine(model, build_optimizer(model, settings.optimizer), settings), [], []
    for table, reader in batches:
        plan = plan_step(table.length, Job(settings).settings)
        backward = partial(engine.backward, step_loss_tokens=int(table.loss_tokens.sum()))
        run_step(plan, engine.forward, backward, partial(rank_inputs, reader, table), context)
        norms.append(engine.step(lr))
        degrees += plan.degrees.tolist()
    change = {name: master - before[name] for name, master in masters(engine).items()}
    return {"change": change, "norms": norms, "degree": max(degrees)}


def losses_of(model: Any, table: Any, reader: Any) -> tuple[float, float]:
    """Run a batch sequence by sequence, forward and backward; return the summed losses of training and evaluation."""
    loss = evaluated = 0.0
    for sequence, length in enumerate(table.length.tolist()):
        tokens = torch.from_numpy(reader.tokens(0, 0, sequence, 0, length + 1))
        of_sequence = model(tokens[:-1], torch.arange(length), tokens[1:])
        of_sequence.backward()
        loss += of_sequence.item()
        with torch.no_grad():
            evaluated += model.eval()(tokens[:-1], torch.arange(length), tokens[1:]).item()
        model.train()
    return loss, evaluated


def steps_alone(
    model: Decoder, settings: Config, batches: list[Batch], lr: float
) -> tuple[dict[str, Tensor], list[float]]:
    """Train some steps of a model in float64 with plain PyTorch, one sequence at a time, with the model's own loss.

    Returns the change of its parameters, and the norms.
    """
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer, norms = build_optimizer(model, settings.optimizer), []
    for group in optimizer.param_groups:
        group["lr"] = lr
    for table, reader in batches:
        optimizer.zero_grad()
        for sequence, length in enumerate(table.length.tolist()):
            tokens = torch.from_numpy(reader.tokens(0, 0, sequence, 0, length + 1))
            loss = model(tokens[:-1], torch.arange(length), tokens[1:])
            (loss / int(table.loss_tokens.sum())).backward()
        limit = settings.optimizer.clip_norm or float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))
        optimizer.step()
        model.end_step(lambda values: values, int(table.loss_tokens.sum()))
    return {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}, norms
