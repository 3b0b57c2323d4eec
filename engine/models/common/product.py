"""Products of linear layers: x [T,I] and a weight [O,I] to x @ weight.T [T,O].

A product is an `Op`, so products stack. The innermost one does the arithmetic; another may communicate around it, as
`engine/parallel/tensor.py` does, and calls its two functions. Letters: T tokens, I inputs, O outputs.

`ADDED` adds the gradient of the weight where it is summed over micro-batches, in float32, if the weight has a function
`add_product` for that (engine/zero/buckets.py). A gradient of its own would be written, read and rounded to bf16 first.
`ADDED` has no `native`: PyTorch's product would compute a gradient of its own. A function of autograd in Python instead
takes the host 5 us longer for each product and its backward pass (1 core of an Intel Xeon). GPUs hide this time unless
micro-batches are so short that they wait for the host. Not measured on a GPU: `benchmarks/gpu/train.py --only added`
and `--only apart`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.dtypes import wider
from engine.models.common.op import Op


def _product(x: Tensor, weight: Tensor) -> tuple[Tensor]:
    return (F.linear(x, weight),)


def _product_backward(dout: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return dout @ weight, dout.T @ x


def _added_backward(dout: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
    add = getattr(weight, "add_product", None)
    if add is None:
        return _product_backward(dout, x, weight)
    add(dout.T, x)
    return dout @ weight, None


def adds(device: torch.device) -> bool:
    """Return whether linear layers use `ADDED` on a device: a CPU has no product of bf16 that is summed in float32.

    In float32 it has one, which rounds otherwise than a product and a sum. So on CPUs gradients stay those of DeepSpeed
    to the last bit.
    """
    return device.type == "cuda"


def add_product(total: Tensor, left: Tensor, right: Tensor, fresh: bool = False) -> None:
    """Add left [M,K] @ right [K,N] to `total` [M,N], in the dtype of `total`; if `fresh`, write it there instead."""
    beta = 0 if fresh else 1
    if left.dtype == total.dtype:
        total.addmm_(left, right, beta=beta)
    else:  # on GPUs only
        torch.addmm(total, left, right, beta=beta, out_dtype=total.dtype, out=total)


def _wide(x: Tensor, weight: Tensor) -> tuple[Tensor]:
    return (F.linear(x.to(wider(x.dtype)), weight.to(wider(x.dtype))),)


def _wide_backward(dout: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return (dout @ weight.to(dout.dtype)).to(x.dtype), (dout.T @ x.to(dout.dtype)).to(weight.dtype)


PRODUCT = Op(_product, _product_backward, keeps=(0, 1), native=F.linear)  # in the dtype of its inputs
ADDED = Op(_product, _added_backward, keeps=(0, 1), referenced=(1,))  # the same, for parameters with `add_product`
WIDE = Op(_wide, _wide_backward, keeps=(0, 1))  # in at least float32; saves x in its own dtype
