"""What a rank's memory holds, in bytes: the estimate that rule 2 of `verify` and the launch are checked against.

Not counted: the runtime itself. A CUDA context and NCCL take 1 to 2 GB; `cluster.device_memory` is what is left.
Letters: b bytes of an element in the model's dtype, w bytes in the wider of that and fp32 (norms, log-sum-exp, loss).
"""

from __future__ import annotations

from engine.config import schema
from engine.cost.flops import linear_weights

ELEMENT = {"bf16": 2, "fp32": 4, "fp64": 8}


def element_bytes(dtype: str) -> tuple[int, int]:
    """Return b and w."""
    return ELEMENT[dtype], max(ELEMENT[dtype], 4)


def parameters(model: schema.Model) -> int:
    """Return the number of parameters: matrices, norms, and the embedding where the head does not share it."""
    norms = (2 * model.layers + 1) * model.hidden
    return linear_weights(model) + norms + (0 if model.tied else model.hidden * model.vocab)


def saved_bytes(model: schema.Model, dtype: str) -> int:
    """Return what the forward pass keeps of a token for the backward pass, all layers, nothing recomputed.

    A LLaMA layer (h hidden, q = heads x head_dim, kv = kv_heads x head_dim, f = ffn) keeps
    - for each of its two norms the input in the wider dtype, the normalised rows and the scaled ones: h (w + 2 b);
    - for attention q, k, v, the output (which is also the input of the last product) and the log-sum-exp of each
      head: (2 q + 2 kv) b + heads w;
    - for SwiGLU the gate, the activated gate, the other branch and their product: 4 f b.
    The last norm keeps as much as any other.
    """
    b, w = element_bytes(dtype)
    norm = model.hidden * (w + 2 * b)
    attention = 2 * (model.heads + model.kv_heads) * model.head_dim * b + model.heads * w
    swiglu = 4 * model.ffn * b
    return model.layers * (2 * norm + attention + swiglu) + norm


def working_bytes(model: schema.Model, dtype: str) -> int:
    """Return what a token needs beside that for a while: the larger of the loss's and of one layer's backward pass.

    The loss holds the logits, and in the wider dtype their copy, its softmax and its gradient. A layer's backward pass
    holds the gradients of its three f-wide tensors, of its residual stream (twice) and of q, k, v and the output.
    """
    b, w = element_bytes(dtype)
    loss = model.vocab * (b + 3 * w)
    attention = 2 * (model.heads + model.kv_heads) * model.head_dim
    layer = (3 * model.ffn + 2 * model.hidden + attention) * b
    return max(loss, layer)


def ring_bytes(model: schema.Model, dtype: str) -> int:
    """Return the buffers of a ring, for each token of its largest shard: K,V and dK,dV, each held and on its way."""
    b, w = element_bytes(dtype)
    return 2 * (2 * model.kv_heads * model.head_dim) * (b + w)


def state_bytes(model: schema.Model, dtype: str, ranks: int) -> int:
    """Return a rank's model states under ZeRO-1 of P parameters, by DeepSpeed's optimizer class.

    bf16 runs BF16_Optimizer: 2P weights, 4P fp32 gradients, 12P / ranks. Other dtypes: weights and gradients, and three
    tensors (master weights and two moments) in the wider dtype over all ranks.
    """
    b, w = element_bytes(dtype)
    count = parameters(model)
    return (b + w) * count + -(-3 * w * count // ranks)


def passing_bytes(model: schema.Model, dtype: str) -> int:
    """Return the bf16 gradients that exist beside the fp32 ones until they are added; none in other dtypes.

    They grow through the backward pass as saved activations go, so a rank needs the larger of the two, not their sum.
    """
    return 2 * parameters(model) if dtype == "bf16" else 0
