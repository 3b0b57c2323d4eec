"""Compiles the pointwise operations of a model with torch.compile: one kernel for each forward and backward function.

Only the functions of `models/common/pointwise.py` and a part of ring attention's merge are compiled. They run outside
autograd, so compiled code contains no collectives, and the compiler does not decide which tensors are saved for the
backward pass. The code is specialised for the widths of the model, but not for the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from engine.close import mismatch
from engine.config.schema import Model
from engine.dtypes import wider
from engine.family.families import family_of
from engine.models.common.op import Op
from engine.models.common.pointwise import NORM, ROTATE, SWIGLU
from engine.selection import Candidate, Selected, select

Compile = Callable[[Op], Op]

_TEST_TOKENS = 6
# Largest allowed error max|a - b| / max|b| in the self-test. Compiled code rounds to bf16 only once, at its end.
TOLERANCE = {torch.bfloat16: 3e-2, torch.float32: 1e-5, torch.float64: 1e-12}


def fuse(model: nn.Module, shape: Model, device: torch.device, dtype: torch.dtype, wish: str = "auto") -> None:
    """Compile the pointwise operations of a model, in place. `wish` is "always", "never", or "auto": only on a GPU.

    If torch.compile fails its self-test, this is logged and the operations stay uncompiled.
    """
    if not is_fused(shape, device, dtype, wish):
        return
    for module in model.modules():
        if isinstance(op := getattr(module, "op", None), Op):
            setattr(module, "op", compiled(op))  # noqa: B010  (to mypy, attributes of a Module are tensors or modules)


def is_fused(shape: Model, device: torch.device, dtype: torch.dtype, wish: str) -> bool:
    """Return whether pointwise operations are compiled: the config asks for it, and it works here."""
    return wanted(wish, device) and choose(device, dtype, shape).implementation is compiled


def wanted(wish: str, device: torch.device) -> bool:
    """Return whether the config's `compile` asks for compiled code on a device."""
    return wish == "always" or (wish == "auto" and device.type == "cuda")


@cache
def choose(device: torch.device, dtype: torch.dtype, shape: Model) -> Selected[Compile]:
    """Select whether pointwise operations are compiled, and log the reason. Cached.

    The selected implementation is a function from an operation to its compiled version, or to the operation itself.
    """
    test = partial(fault, device=device, dtype=dtype, shape=shape)
    with_compiler: Candidate[Compile] = Candidate("torch.compile", "fused kernels", lambda: compiled, test)
    eager: Candidate[Compile] = Candidate("eager", "torch.compile does not work here", lambda: _eager)
    return select(f"pointwise operations for {dtype} on {device.type}", (with_compiler, eager))


def _eager(op: Op) -> Op:
    """Return the operation unchanged."""
    return op


@cache
def compiled(op: Op) -> Op:
    """Return the operation with both functions compiled. Compilation happens when they are first called."""
    return op.around(compiled_function(op.forward), compiled_function(op.backward))


def compiled_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of tensors that runs compiled, for inputs of any number of rows and outside autograd."""
    fast = torch.compile(function)

    @wraps(function)
    def run(first: Tensor, *others: Any) -> Any:
        # Detached, because the compiler would otherwise read `.grad`, which tensors inside a graph do not have.
        inputs = [value.detach() if isinstance(value, Tensor) else value for value in (first, *others)]
        # torch.compile would compile again for 0 or 1 tokens, so run these uncompiled. It would also compile again for
        # another grad mode, which differs between a self-test and the forward pass of an autograd function.
        with torch.no_grad():
            return fast(*inputs) if len(first) > 1 else function(*inputs)

    return run


def fault(compile_: Compile, device: torch.device, dtype: torch.dtype, shape: Model) -> str | None:
    """Compare compiled operations with uncompiled ones, outputs and gradients, on a few tokens of a model's shape.

    Returns a description of the first mismatch, or None.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).to(device, dtype).requires_grad_()

    angles = torch.rand(_TEST_TOKENS, 1, shape.head_dim, generator=generator).to(device, wider(dtype))
    examples: list[tuple[str, Op, tuple[Any, ...]]] = [
        ("norm", NORM, (random(_TEST_TOKENS, shape.hidden), random(shape.hidden), shape.norm_eps)),
        ("swiglu", SWIGLU, (random(_TEST_TOKENS, shape.ffn), random(_TEST_TOKENS, shape.ffn))),
        ("rotate", ROTATE, (random(_TEST_TOKENS, shape.heads, shape.head_dim), angles.cos(), angles.sin())),
    ]
    if family_of(shape).qk_norm:
        of_heads = random(_TEST_TOKENS, shape.heads, shape.head_dim), random(shape.head_dim), shape.norm_eps
        examples.append(("norm of heads", NORM, of_heads))
    for name, op, inputs in examples:
        pairs = zip(_output_and_gradients(compile_(op), inputs), _output_and_gradients(op, inputs), strict=True)
        if wrong := mismatch([(name, *pair) for pair in pairs], TOLERANCE[dtype]):
            return wrong
    return None


def _output_and_gradients(op: Op, inputs: tuple[Any, ...]) -> list[Tensor]:
    """Return the output, followed by the gradient of each input that requires one, for a fixed output gradient."""
    out = op(*inputs)
    wanted = [value for value in inputs if isinstance(value, Tensor) and value.requires_grad]
    dout = torch.linspace(-1, 1, out.numel(), device=out.device).to(out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad(out, wanted, dout)]
