"""Pointwise parts through torch.compile: one kernel forward and one backward, in place of one for each operation.

Each is a function of tensors alone that runs outside autograd, so no collective is in a compiled region and a compiler
decides nothing about memory (`engine/models/pointwise.py`). The first shape is compiled as it is, all others once, for
any number of tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn

from engine.models.pointwise import NORM, ROTATE, SWIGLU, Op

_LOG = logging.getLogger(__name__)
# Largest error, max|a - b| / max|b|: compiled code rounds to the narrow dtype once, at its end.
TOLERANCE = {torch.bfloat16: 3e-2, torch.float32: 1e-5, torch.float64: 1e-12}


def fuse(model: nn.Module, device: torch.device, dtype: torch.dtype, wish: str = "auto") -> None:
    """Let a model run its pointwise parts compiled, if `wish` is `always`, or `auto` and the device a GPU.

    What does not compile here, or gives other numbers, is reported, and the parts run as they are.
    """
    if wish == "never" or (wish == "auto" and device.type != "cuda"):
        return
    wrong = _fault(device, dtype)
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
    """Return a function compiled at its first call. Without any token it runs as it is: that needs no code."""
    fast = torch.compile(function)

    @wraps(function)
    def run(*inputs: Any) -> Any:
        # The compiler would look at the gradients of tensors that are in a graph, and have none.
        inputs = tuple(value.detach() if isinstance(value, Tensor) else value for value in inputs)
        empty = any(isinstance(value, Tensor) and not value.numel() for value in inputs)
        return function(*inputs) if empty else fast(*inputs)

    return run


@cache
def _fault(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return what is wrong with compiled parts on a device, or None: their outputs and gradients beside the plain."""
    try:
        for op, inputs in _examples(device, dtype):
            for found, expected in zip(_both(compiled(op), inputs), _both(op, inputs), strict=True):
                error = float((found - expected).abs().max() / expected.abs().max())
                if not error <= TOLERANCE[dtype]:
                    return f"{op.forward.__name__.strip('_')} is off by {error:.2g} of the largest element"
    except (ImportError, OSError, RuntimeError, AssertionError, AttributeError, TypeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def _examples(device: torch.device, dtype: torch.dtype) -> list[tuple[Op, tuple[Any, ...]]]:
    """Return inputs of each part for 6 tokens; those that know a gradient ask for it."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()

    angles = torch.rand(6, 1, 8, generator=generator).to(device, torch.promote_types(dtype, torch.float32))
    return [
        (NORM, (draw(6, 32), draw(32), 1e-5)),
        (SWIGLU, (draw(6, 32), draw(6, 32))),
        (ROTATE, (draw(6, 2, 8), angles.cos(), angles.sin())),
    ]


def _both(op: Op, inputs: tuple[Any, ...]) -> list[Tensor]:
    """Return the output and the gradient of each input that has one."""
    out = op(*inputs)
    wanted = [value for value in inputs if isinstance(value, Tensor) and value.requires_grad]
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).to(out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad(out, wanted, weights)]
