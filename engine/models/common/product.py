"""Products of linear layers: x [T,I] and a weight [O,I] to x @ weight.T [T,O].

A product is an `Op`, so products stack. The innermost one does the arithmetic; another may communicate around it, as
`engine/parallel/tensor.py` does, and calls its two functions. Letters: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from engine.dtypes import wider
from engine.models.common.op import Op


def _product(x: Tensor, weight: Tensor) -> tuple[Tensor]:
    return (F.linear(x, weight),)


def _product_backward(dout: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return dout @ weight, dout.T @ x


def _wide(x: Tensor, weight: Tensor) -> tuple[Tensor]:
    return (F.linear(x.to(wider(x.dtype)), weight.to(wider(x.dtype))),)


def _wide_backward(dout: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return (dout @ weight.to(dout.dtype)).to(x.dtype), (dout.T @ x.to(dout.dtype)).to(weight.dtype)


PRODUCT = Op(_product, _product_backward, keeps=(0, 1), native=F.linear)  # in the dtype of its inputs
WIDE = Op(_wide, _wide_backward, keeps=(0, 1))  # in at least float32; saves x in its own dtype
