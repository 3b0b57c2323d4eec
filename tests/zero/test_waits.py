"""How often DeepSpeed reads a value of the device: what docs/gpu.md lists as the waits of a step.

A run on a CPU shows them too, by the operators and methods that give values to Python. It does not show copies by
`to`, indexing with a mask, and waits for events and streams.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.config.load import load
from engine.models.common.attention import LocalAttention
from engine.models.common.initialise import initialise
from engine.models.decoder import Decoder
from engine.trainer.optimizer import build_optimizer
from engine.zero.engine import ZeroEngine
from engine.zero.shards import sharded, stored
from tests.world import run_world

pytestmark = pytest.mark.world

CASES = list(product((1, 2, 3), ("fp32", "bf16")))
OPERATORS = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero", "aten::masked_select")
METHODS = ("tolist", "numpy", "cpu")  # no operators on a CPU; PyTorch's function modes do not see them in hooks
SPOILS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "if": lambda x: bool(x.sum() > 0),
    "equal": lambda x: torch.equal(x, x + 1),
    "nonzero": torch.nonzero,
    "masked_select": lambda x: x.masked_select(x > 0),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.detach().numpy(),
    "cpu": lambda x: x.cpu(),
}


class Reads(TorchDispatchMode):
    """Counts the operators and methods that read values. What is computed from a copy by `cpu` alone is on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.patch, self.host = 0, pytest.MonkeyPatch(), list[Tensor]()

    def __enter__(self) -> Reads:
        for name in METHODS:
            self.patch.setattr(Tensor, name, self.counted(getattr(Tensor, name)))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.patch.undo()

    def counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any, **more: Any) -> Any:
            self.count += not self.on_host(arguments[0])
            result = method(*arguments, **more)
            if isinstance(result, Tensor):
                result = result.view_as(result)  # on a CPU, `cpu` returns the tensor itself
                self.host.append(result)
            return result

        return counting

    def on_host(self, tensor: Tensor) -> bool:
        return any(tensor is kept for kept in self.host)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [value for value in args if isinstance(value, Tensor)]
        if given and all(map(self.on_host, given)):
            self.host += [result] if isinstance(result, Tensor) else []
        else:
            self.count += func.name().startswith(OPERATORS)
        return result


def reads(stage: int, dtype: str, spoil: Callable[[Tensor], Any] | None = None) -> list[tuple[int, int]]:
    """On a rank: the reads in two micro-batches and in the update, for each of four steps.

    `spoil` gets a tensor in the forward pass, and its gradient in the backward pass.
    """
    shape = ["model.layers=2", "model.hidden=32", "model.ffn=48"]
    config = load(["recipe=quickstart", *shape, f"dtype={dtype}", f"zero.stage={stage}", "optimizer.clip_norm=0.1"])
    device, tokens, found = torch.device("cpu"), torch.arange(5), []
    with sharded(config):
        model = Decoder(config.model).to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    initialise(model, 0, device, stored)
    if spoil is not None:
        model.norm.register_forward_hook(lambda module, given, out: spoiled(out, spoil))
    engine = ZeroEngine(model, build_optimizer(model, config.optimizer), config)
    attention = LocalAttention(tokens)
    for _ in range(4):
        with Reads() as micro_batches:
            for _ in range(2):
                engine.backward(engine.forward(tokens, tokens, tokens, attention), 10)
        with Reads() as update:
            norm = engine.step(1e-3)
        assert norm > 0.1, "clipped"
        found.append((micro_batches.count, update.count))
    return found


def spoiled(x: Tensor, spoil: Callable[[Tensor], Any]) -> None:
    def backward(gradient: Tensor) -> None:
        spoil(gradient)

    spoil(x)
    x.register_hook(backward)


def all_reads() -> list[list[tuple[int, int]]]:
    return [reads(*case) for case in CASES]


def test_an_update_reads_one_value() -> None:
    """Only the norm, once. In the first step, our loss tests itself, and ZeRO-3 compares its gathers between ranks."""
    (found, _) = run_world(2, all_reads)
    for (stage, dtype), steps in zip(CASES, found, strict=True):
        assert steps[1:] == [(0, 1)] * 3, (stage, dtype, steps)


def spoiled_reads() -> dict[str, tuple[int, int]]:
    return {name: reads(1, "fp32", spoil)[-1] for name, spoil in SPOILS.items()}


def test_each_read_in_a_micro_batch_is_counted() -> None:
    """In both passes of both micro-batches, whatever the way to read."""
    (found,) = run_world(1, spoiled_reads)
    assert {name: micro for name, (micro, _) in found.items()} == dict.fromkeys(SPOILS, 4)
