"""The memory model as a table: the tensors on a device at each instant of a step, and their bytes.

`bytes` and `when` of a row are Python expressions over `LETTERS`. The same strings are evaluated here and shown in
docs/memory.md: `python -m engine.cost.table docs/memory.md` writes the tables into that page, and a test compares both.
`source` is the function that allocates the tensor, in DeepSpeed (deepspeed/), PyTorch (torch/) or here (engine/).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from itertools import groupby
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

from engine.config import schema
from engine.config.devices import uses_gpus
from engine.cost import sizes
from engine.cost.flops import largest_layer
from engine.cost.sizes import device_parameters, element_bytes, experts_apart, moments, parameters, pinned
from engine.cost.times import rounds_per_call
from engine.family.families import family_of

Letters = Mapping[str, Any]
LEAST_CHUNK = 1024  # tokens of a chunk of the loss: for smaller chunks, summing the head's gradient takes longest
MARKERS = ("<!-- table: begin -->", "<!-- table: end -->")
LETTERS = {
    "b, w": "bytes of an element in the model's dtype; in the wider of this dtype and fp32",
    "h, f, V, N": "hidden size, ffn, vocabulary, layers",
    "e, k": "experts of a layer, experts per token (top_k); both 1 in a dense layer",
    "q, kv": "heads x head_dim, kv_heads x head_dim",
    "v": "most rounds of a call of attention: 4 in a pipeline, else 1",
    "P": "parameters of the model; for model states, those of a device",
    "S": "size of a ZeRO partition: P / ranks, where P counts the experts of the whole ep group",
    "H, Y, E, L": "parameters of the head; of the largest layer's matrices; of one SwiGLU matrix of all experts; "
    "L = max(H, E)",
    "m": "elements of the optimizer's states besides master weights: 2 * S with AdamW; S with SGD, or 0 without "
    "momentum",
    "BUCKET, B": "67,108,864 elements, of a bucket of gradients in stages 2 and 3; B = min(P, BUCKET)",
    "apart": "1 if experts have buckets of their own (parallel.ep > 1, or an optimizer that keeps other states of "
    "experts), else 0",
    "SUB_GROUP": "1,000,000,000 elements, DeepSpeed's default",
    "qk_norm": "whether the family normalises the queries and keys of each head",
    "Q": "bytes per token that these norms save for the backward pass without recomputation",
    "A, F": "bytes per token that attention saves for the backward pass; that SwiGLU, or router and experts, save; "
    "without recomputation and tiles",
    "G": "F; with tiles only the bytes per token that the router's losses save",
    "last": "whether the device is of the last stage, with the last norm and the head",
    "stage, on_host, weights_on_host, recompute, tile": "zero.stage, optimizer.on_host, zero.weights_on_host, "
    "recompute, mlp_tile",
    "fp8": "whether linear_dtype is fp8",
    "added": "products of linear layers add the gradients of their weights to those of the step: on GPUs, in stages 1 "
    "and 2, without FP8",
    "compiled": "pointwise operations are compiled: compile=always, or auto on GPUs",
    "cpu": "the devices are processes on CPUs: allocated memory is resident only once it has been written",
    "pinned(x)": "next power of two, as PyTorch allocates pinned memory; for the sum of many tensors, at most 2 * x",
}

# Instants. The value of each is the title of its table.
ALWAYS = "Model states and ZeRO's buffers: always"
HOST = "On the host: always"
SAVED = "Saved by each layer, per token"
KEPT = "Saved by the model, per token"
LAYER = "Backward pass of the last layer"
SWIGLU = "Backward pass of the last layer, in SwiGLU"
ATTENTION = "Backward pass of the last layer, in attention"
LOSS = "Loss"
LOSS_FEW = "Loss, chunks of 1,024 tokens"
LOSS_MANY = "Loss, larger chunks"
LOSS_END = "Loss, end"
HEAD = "Reduction of the head's gradient"
RINGS = "Ring buffers, per token of a ring's largest shard"
END = "End of the step: reduction and update"

DEVICE, TOKEN, TILE = "device", "token", "token of a tile"


class Row(NamedTuple):
    """Bytes of one tensor at one instant: on each device, per token, or per token of a tile.

    For model states, letters that count parameters are those of one device of a stage; H is 0 without the head.
    Rows of activations are for the whole model; their sums are divided by the tensor parallel degree.
    """

    instant: str
    item: str  # key of `estimate-memory --json`, or a group of rows that are summed together
    tensor: str
    bytes: str
    when: str
    source: str
    each: str = DEVICE


_BUCKETS = "engine/zero/buckets.py"
_HOST_BUFFERS = "engine/zero/sharded.py: _host_buffers"
_Z3 = "deepspeed/runtime/zero/stage3.py: "
_PARTITION = "deepspeed/runtime/zero/partition_parameters.py: _partition_param"
_EPILOGUE = "independent_gradient_partition_epilogue"
_ONE_BY_ONE = "reduce_independent_p_g_buckets_and_remove_grads"
_ADAM = "torch/optim/adam.py: _init_group"
_RING = "engine/attention"
_FFN = "engine/models/common"
_EXPERTS = "engine/models/experts"
_FP8 = "engine/models/common/fp8.py"
_CHUNKS = "engine/models/common/loss.py"
_LINEAR = "torch/nn/functional.py: linear"
_NONE = "recompute == 'none'"
_ALL = "True"

# fmt: off
ROWS = (
    Row(ALWAYS, "parameters", "weights", "b * P", "stage < 3", _BUCKETS),
    Row(ALWAYS, "parameters", "partition of the weights", "b * S", "stage == 3 and not weights_on_host", _PARTITION),
    Row(ALWAYS, "gradients", "gradients", "w * P", "stage == 1", _BUCKETS),
    Row(ALWAYS, "gradients", "partition of the gradients", "w * S", "stage == 2", _BUCKETS),
    Row(ALWAYS, "gradients", "partition of the gradients", "w * S", "stage == 3 and not on_host",
        _Z3 + "grad_partitions_flat_buffer"),
    Row(ALWAYS, "optimizer", "partition of master weights and moments", "w * (S + m)", "not on_host",
        _ADAM),
    Row(ALWAYS, "gather_buffers", "gradients of buckets: one grows, or also one of experts, and one is reduced",
        "w * min(P, (2 + apart) * BUCKET)", "stage == 2", _BUCKETS),
    Row(ALWAYS, "gather_buffers", "gradient bucket", "w * B", "stage == 3", _Z3 + "_setup_for_real_optimizer"),
    Row(ALWAYS, "gather_buffers", "copies of the bucket during its reduction", "w * B", "stage == 3 and P > BUCKET",
        _Z3 + "__avg_scatter_contiguous_grads"),
    Row(ALWAYS, "gather_buffers", "gathered weights: two layers, or the head", "b * max(2 * Y, H)", "stage == 3",
        "deepspeed/runtime/zero/partitioned_param_coordinator.py: fetch_sub_module"),

    Row(HOST, "host", "gradients for the update", "w * S", "on_host and stage < 3", _HOST_BUFFERS),
    Row(HOST, "host", "master weights", "w * S", "on_host and stage < 3", _BUCKETS),
    Row(HOST, "host", "updated weights", "b * S", "on_host and stage < 3", _HOST_BUFFERS),
    Row(HOST, "host", "moments", "w * m", "on_host and stage < 3", _ADAM),
    Row(HOST, "host", "accumulated gradients", "pinned(w * S)", "on_host and stage == 3",
        _Z3 + "grad_partitions_flat_buffer"),
    Row(HOST, "host", "gradients for the update", "pinned(w * S, many=S > SUB_GROUP)", "on_host and stage == 3",
        _Z3 + "initialize_optimizer_states"),
    Row(HOST, "host", "master weights and moments", "w * (S + m)", "on_host and stage == 3",
        _Z3 + "_create_fp32_partitions"),
    Row(HOST, "host", "partition of the weights", "pinned(b * S)", "weights_on_host",
        _Z3 + "_create_param_groups_fp16_flat_cpu_memory"),
    Row(HOST, "host", "the same weights as one tensor per parameter, before flattening; they stay in PyTorch's cache",
        "pinned(b * S, many=True)", "weights_on_host", _PARTITION),

    Row(SAVED, "norms", "two norms: input, output and reciprocal RMS", "2 * (2 * b * h + w)", _NONE, _FFN, TOKEN),
    Row(SAVED, "heads", "queries and keys before their norms, and reciprocal RMS of each head",
        "b * (q + kv) + w * (heads + kv_heads)", f"{_NONE} and qk_norm", _FFN, TOKEN),
    Row(SAVED, "attention", "q, k, v and output", "2 * b * (q + kv)", "recompute != 'layer'", _RING, TOKEN),
    Row(SAVED, "attention", "log-sum-exp of each head", "w * heads", "recompute != 'layer'", _RING, TOKEN),
    Row(SAVED, "ffn", "gate, up and their product", "3 * b * k * f", f"{_NONE} and not tile", _FFN, TOKEN),
    Row(SAVED, "ffn", "router's probabilities; the index and two weights of each chosen expert, and their sum",
        "w * (e + 1) + k * (8 + 2 * w)", f"{_NONE} and not tile and e > 1", _EXPERTS, TOKEN),
    Row(SAVED, "router", "router's losses: logits, probabilities, weights, log-sum-exp", "w * (3 * e + 1)",
        "e > 1", _EXPERTS, TOKEN),
    Row(SAVED, "router", "chosen experts, for when the layer is computed again", "4 * k",
        "recompute != 'none' and not tile and e > 1", _EXPERTS, TOKEN),
    Row(SAVED, "entry", "input of the layer", "b * h", "recompute != 'none'", "engine/models/recompute.py", TOKEN),

    Row(KEPT, "activations", "last norm: input, output and reciprocal RMS", "2 * b * h + w", "last", _FFN, TOKEN),
    Row(KEPT, "activations", "output of the stage", "b * h", "not last", "engine/trainer/step.py", TOKEN),
    Row(KEPT, "positions", "cosines and sines of the position, on every device of a tp group", "2 * w * head_dim", _ALL,
        _FFN, TOKEN),

    Row(LAYER, "activations", "gradient of the residual stream", "b * h", _ALL, _LINEAR, TOKEN),
    Row(LAYER, "activations", "last norm: released", "-(2 * b * h + w)", "last", _FFN, TOKEN),
    Row(LAYER, "activations", "recomputed: the layer except its input", "2 * (2 * b * h + w) + Q + A + G - b * h",
        "recompute == 'layer'", "engine/models/recompute.py", TOKEN),
    Row(LAYER, "activations", "recomputed: the second norm and SwiGLU", "2 * b * h + w + G",
        "recompute == 'layer_keep_attention'", "engine/models/recompute.py", TOKEN),
    Row(LAYER, "activations", "recomputed SwiGLU and its gradients", "F + 3 * b * k * f", "tile",
        "engine/models/common/tiles.py", TILE),
    Row(LAYER, "activations", "gradients of SwiGLU's weights: from one tile, and summed over tiles",
        "3 * (b + w) * E", "tile and not (added and e == 1)", "engine/models/common/tiles.py"),
    Row(LAYER, "activations", "a matrix in FP8, and its transpose", "2 * h * (max(q, f) if e == 1 else q)", "fp8",
        _FP8),
    Row(LAYER, "activations", "the same in fp32, before it is rounded", "w * h * (max(q, f) if e == 1 else q)",
        "fp8 and not compiled", _FP8),
    Row(LAYER, "activations", "gradient of the head", "b * H", "last and tied", _LINEAR),
    Row(LAYER, "activations", "gradient of a SwiGLU matrix larger than the bucket, reduced separately",
        "b * E + w * (E - BUCKET)", "stage > 1 and E > BUCKET", _Z3 + _ONE_BY_ONE),

    Row(SWIGLU, "activations", "gradients of gate and up; the gradient of their product replaces the output",
        "2 * b * k * f", "not tile", _LINEAR, TOKEN),
    Row(SWIGLU, "activations", "gradient of the output in FP8; the product of gate and up in FP8, and its transpose, "
        "are there before the gradient of up", "h", "fp8 and e == 1 and not tile", _FP8, TOKEN),
    Row(SWIGLU, "activations", "the same product in fp32, before it is rounded", "(w - 1) * f",
        "fp8 and not compiled and e == 1 and not tile", _FP8, TOKEN),
    Row(SWIGLU, "activations", "gradient of the output of the experts", "b * k * h", "e > 1 and not tile", _EXPERTS,
        TOKEN),

    Row(ATTENTION, "activations", "second norm and SwiGLU: released", "-(2 * b * h + w + G)", _ALL, _FFN, TOKEN),
    Row(ATTENTION, "activations", "gradients of output and q; one of the two also in the wider dtype",
        "(2 * b + w) * q", _ALL, _RING, TOKEN),
    Row(ATTENTION, "activations", "norm of the queries: three products in the wider dtype, in place of the gradients "
        "of the output", "(2 * w - b) * q", "qk_norm", _FFN, TOKEN),
    Row(ATTENTION, "activations", "gradients of k and v", "2 * b * kv", _ALL, _RING, TOKEN),

    Row(LOSS, "logits", "input of the head", "b * h", _ALL, _CHUNKS, TOKEN),
    Row(LOSS, "logits", "gradient of the head, summed over chunks", "w * H", _ALL, _CHUNKS),
    Row(LOSS, "logits", "gradients of buckets: not allocated before the first gradient",
        "-w * min(P, (2 + apart) * BUCKET)", "stage == 2", _BUCKETS),
    Row(LOSS_FEW, "logits", "logits of a chunk and their gradient", "2 * w * V", _ALL, _CHUNKS, TILE),
    Row(LOSS_FEW, "logits", "copy of the head in the wider dtype", "w * H", "cpu and b < w", _CHUNKS),
    Row(LOSS_MANY, "logits", "logits of a chunk and their gradient", "2 * w * min(V, 2 * h)", _ALL, _CHUNKS, TOKEN),
    Row(LOSS_MANY, "logits", "copy of the head in the wider dtype", "w * H", "cpu and b < w", _CHUNKS),
    Row(LOSS_MANY, "logits", "rounding of a chunk up to whole tokens", "2 * w * V", _ALL, _CHUNKS),
    Row(LOSS_END, "logits", "gradient of the head in the model's dtype", "b * H", "b < w", _CHUNKS),

    Row(HEAD, "logits", "gradient of the residual stream", "b * h", _ALL, _LINEAR, TOKEN),
    Row(HEAD, "logits", "gradient of the head, larger than the bucket, reduced separately",
        "b * H + w * (H - BUCKET)", "stage > 1 and H > BUCKET", _Z3 + _ONE_BY_ONE),

    Row(RINGS, "ring_buffers", "K and V of the rounds of two calls: in use and in transit", "4 * v * b * kv", _ALL,
        "engine/attention/buffers.py", TOKEN),
    Row(RINGS, "ring_buffers", "dK and dV, each twice: in use and in transit", "4 * w * kv", _ALL,
        "engine/attention/buffers.py", TOKEN),
    Row(RINGS, "ring_buffers", "keys of a call, for low and for high queries, and their gradients in two calls",
        "12 * v * b * kv", "v > 1", _RING, TOKEN),

    Row(END, "gradients", "gradients joined for the update", "w * S", "stage == 3 and P > BUCKET and not on_host",
        _Z3 + "_prepare_sub_group"),
    Row(END, "gradients", "copies of the bucket during its reduction", "w * B", "stage == 3 and P <= BUCKET",
        _Z3 + _EPILOGUE),
    Row(END, "gradients", "embedding and its gradient", "2 * b * H", "stage == 3 and P <= BUCKET", _Z3 + _EPILOGUE),
    Row(END, "gradients", "gathered weights: released", "-b * max(2 * Y, H)", "stage == 3 and P <= BUCKET",
        "deepspeed/runtime/zero/partitioned_param_coordinator.py: release_sub_module"),
)
# fmt: on


def model_letters(
    model: schema.Model,
    dtype: str,
    recompute: str = "none",
    tile: int = 0,
    stages: int = 1,
    experts: bool = False,
) -> dict[str, Any]:
    """Values of the letters that depend only on the model, its dtype, recomputation, mlp_tile (`tile`) and stages.

    `experts` says whether the layer has experts; letters that are not of a layer do not depend on it.
    """
    b, w = element_bytes(dtype)
    found: dict[str, Any] = {
        "b": b,
        "w": w,
        "h": model.hidden,
        "f": model.ffn,
        "V": model.vocab,
        "e": model.experts if experts else 1,
        "k": model.top_k if experts else 1,
        "q": model.heads * model.head_dim,
        "kv": model.kv_heads * model.head_dim,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "qk_norm": family_of(model).qk_norm,
        "head_dim": model.head_dim,
        "last": True,
        "v": rounds_per_call(stages),
    }
    plain = found | {"recompute": "none", "tile": 0}
    saved = {item: total(SAVED, plain, TOKEN, item) for item in ("heads", "attention", "ffn", "router")}
    found |= {"Q": saved["heads"], "A": saved["attention"], "F": saved["ffn"] + saved["router"]}
    return found | {"G": saved["router"] if tile else found["F"], "recompute": recompute, "tile": tile}


def letters(
    config: schema.Config, ranks: int = 1, stage: int | None = None, last: bool = True, experts: bool = False
) -> dict[str, Any]:
    """Values of all letters: for one of the devices of a pipeline's `stage`, if `ranks` HDP ranks share the states.

    Without a `stage`, parameters are those of the whole model, and `last` says whether the stage has the head.
    `experts` is that of `model_letters`.
    """
    model, zero = config.model, config.zero.stage
    found = model_letters(model, config.dtype, config.recompute, config.mlp_tile, config.parallel.pp, experts)
    tp = 1 if stage is None else config.parallel.tp
    ends = (True, last) if stage is None else (stage == 0, stage == config.parallel.pp - 1)
    rows = -(-model.vocab // tp) * model.hidden  # of the embedding and the head on a device
    ep = 1 if stage is None else config.parallel.ep
    one_matrix = model.experts // ep * model.ffn * model.hidden // tp
    count = parameters(model) if stage is None else device_parameters(config, stage)
    # The ranks that store the same experts partition them, and they are fewer by the factor of the shares.
    sharded = count if stage is None else device_parameters(config, stage, ep=1)
    found |= {
        "last": ends[1],
        "P": count,
        "H": rows if ends[1] else 0,
        "Y": -(-largest_layer(model, experts=model.experts // ep) // tp),
        "E": one_matrix,
        "L": max(rows if any(ends) else 0, one_matrix),
    }
    found |= {
        "S": -(-sharded // ranks),
        "B": min(found["P"], sizes.BUCKET),
        "BUCKET": sizes.BUCKET,
        "SUB_GROUP": sizes.SUB_GROUP,
        "m": 0 if stage is None else moments(config, stage, ranks, -(-sharded // ranks)),
        "stage": zero,
        "on_host": config.optimizer.on_host,
        "weights_on_host": config.zero.weights_on_host,
        "tied": model.tied,
        "fp8": config.linear_dtype == "fp8",
        "added": uses_gpus(config) and zero < 3 and config.linear_dtype != "fp8",
        "apart": int(experts_apart(config)),
        "compiled": config.compile == "always" or (config.compile == "auto" and uses_gpus(config)),
        "cpu": not uses_gpus(config),
        "pinned": pinned,
    }
    return found


def total(instant: str, values: Letters, each: str = DEVICE, item: str | None = None) -> int:
    """Sum the bytes of an instant's rows of unit `each` whose `when` is true; only those of `item`, if given."""
    chosen = [row for row in ROWS if row.instant == instant and row.each == each and item in (None, row.item)]
    return sum(_evaluate(row.bytes, values) for row in chosen if _evaluate(row.when, values))


def _evaluate(expression: str, values: Letters) -> Any:
    """The value of a row's `bytes` or `when`."""
    # `eval` keeps code and documentation the same string; the expressions are constants of this file.
    return eval(_compiled(expression), {"__builtins__": {"max": max, "min": min}}, values)


@cache
def _compiled(expression: str) -> CodeType:
    return compile(expression, "<memory table>", "eval")


def markdown() -> str:
    """The letters and the rows as Markdown tables, one table of rows per instant."""
    lines = ["| letter | meaning |", "|---|---|", *(f"| {name} | {meaning} |" for name, meaning in LETTERS.items())]
    for instant, rows in groupby(ROWS, key=lambda row: row.instant):
        lines += ["", f"### {instant}", "", "| tensor | bytes | for each | when | source |", "|---|---|---|---|---|"]
        for row in rows:
            when = "always" if row.when == _ALL else f"`{row.when}`"
            lines.append(f"| {row.tensor} | `{row.bytes}` | {row.each} | {when} | `{row.source}` |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """The text `page` with the part between its markers replaced by the tables of `markdown`."""
    before, rest = page.split(MARKERS[0])
    return f"{before}{MARKERS[0]}\n\n{markdown()}\n{MARKERS[1]}{rest.split(MARKERS[1])[1]}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")
