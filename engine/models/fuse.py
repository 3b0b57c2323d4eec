"""Pointwise parts through torch.compile: one kernel forward and one backward, in place of one for each operation.

Each is a function of tensors alone that runs outside autograd, so no collective is in a compiled region and a compiler
decides nothing about memory (`engine/models/pointwise.py`). Code is made for the model's widths and any number of
tokens from two on: once for those of the self-test, once for all others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from engine.close import in_a_line, too_far
from engine.config.schema import Model
from engine.dtypes import wider
from engine.models.llama.model import Llama
from engine.models.pointwise import NORM, ROTATE, SWIGLU, Op

_LOG = logging.getLogger(__name__)
_TOKENS = 6  # of the self-test
# Largest error, max|a - b| / max|b|: compiled code rounds to the narrow dtype once, at its end.
TOLERANCE = {torch.bfloat16: 3e-2, torch.float32: 1e-5, torch.float64: 1e-12}


def fuse(model: Llama, device: torch.device, dtype: torch.dtype, wish: str = "auto") -> None:
    """Let a model run its pointwise parts compiled, if `wish` is `always`, or `auto` and the device a GPU.

    What does not compile here, or gives other numbers, is reported, and the parts run as they are.
    """
    if wish == "never" or (wish == "auto" and device.type != "cuda"):
        return
    wrong = _fault(device, dtype, model.shape)
    if wrong is not None:
        _LOG.warning("torch.compile does not serve on %s, so pointwise parts run without it: %s", device.type, wrong)
        return
    _LOG.info("pointwise parts for %s on %s: torch.compile", dtype, device.type)
    for module in model.modules():
        if isinstance(op := getattr(module, "op", None), Op):
            setattr(module, "op", compiled(op))  # noqa: B010  (a Module's attributes are tensors and modules to mypy)


@cache
def compiled(op: Op) -> Op:
    """Return an op whose two functions are compiled."""
    return Op(_compiled(op.forward), _compiled(op.backward), op.keeps)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function compiled at its first call. Of fewer than two tokens it runs as it is: code of its own would be
    made for them."""
    fast = torch.compile(function)

    @wraps(function)
    def run(first: Tensor, *others: Any) -> Any:
        # The compiler would look at the gradients of tensors that are in a graph, and have none.
        inputs = [value.detach() if isinstance(value, Tensor) else value for value in (first, *others)]
        return fast(*inputs) if len(first) > 1 else function(*inputs)

    return run


@cache
def _fault(device: torch.device, dtype: torch.dtype, shape: Model) -> str | None:
    """Return what is wrong with compiled parts on a device, or None: their outputs and gradients beside the plain."""
    try:
        for op, inputs in _examples(device, dtype, shape):
            name = op.forward.__name__.strip("_")
            results = [(name, *pair) for pair in zip(_both(compiled(op), inputs), _both(op, inputs), strict=True)]
            if wrong := too_far(results, TOLERANCE[dtype]):
                return wrong
    except (ImportError, OSError, RuntimeError, AssertionError, AttributeError, TypeError) as failure:
        return in_a_line(failure)
    return None


def _examples(device: torch.device, dtype: torch.dtype, shape: Model) -> list[tuple[Op, tuple[Any, ...]]]:
    """Return inputs of each part for a few tokens of a model; those that have a gradient ask for it."""
    generator = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).to(device, dtype).requires_grad_()

    angles = torch.rand(_TOKENS, 1, shape.head_dim, generator=generator).to(device, wider(dtype))
    return [
        (NORM, (draw(_TOKENS, shape.hidden), draw(shape.hidden), shape.norm_eps)),
        (SWIGLU, (draw(_TOKENS, shape.ffn), draw(_TOKENS, shape.ffn))),
        (ROTATE, (draw(_TOKENS, shape.heads, shape.head_dim), angles.cos(), angles.sin())),
    ]


def _both(op: Op, inputs: tuple[Any, ...]) -> list[Tensor]:
    """Return the output and the gradient of each input that has one."""
    out = op(*inputs)
    wanted = [value for value in inputs if isinstance(value, Tensor) and value.requires_grad]
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).to(out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad(out, wanted, weights)]
