"""The compiled merge of ring blocks gives the numbers of the plain one, and is used only where it is asked for.

If these fail, a ring on GPUs is wrong, or spends a tenth of a round on passes over its output.
"""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention import merge as merging
from engine.attention.kernels.call import Merge, merge
from tests.attention.rings import CPU

BF16 = torch.bfloat16
COMPILER = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Forget what was chosen, before and after."""
    merging.choose.cache_clear()
    yield
    merging.choose.cache_clear()


def block(tokens: int, heads: int, seed: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lse = scale * torch.randn(tokens, heads, generator=generator, dtype=torch.float64)
    return torch.randn(tokens, heads, 4, generator=generator, dtype=torch.float64), lse


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_merged_blocks_are_attention_over_the_keys_of_both(scale: float) -> None:
    """Against the first formula, in a form that does not overflow: weights relative to the larger log-sum-exp."""
    (out, lse), (part_out, part_lse) = block(5, 3, 0, scale), block(5, 3, 1, scale)
    largest = torch.maximum(lse, part_lse)
    old, new = (lse - largest).exp(), (part_lse - largest).exp()
    expected = (old[..., None] * out + new[..., None] * part_out) / (old + new)[..., None]
    expected_lse = largest + (old + new).log()
    merge(out, lse, part_out, part_lse)
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("wish", ["auto", "never"])
def test_a_cpu_merges_without_the_compiler_unless_asked(wish: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", None)
    assert merging.choose(CPU, BF16, 4, 16, wish) is merge


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # PyTorch's own, when it imports its compiler
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_the_compiled_merge_is_one_pass_with_the_numbers_of_the_plain_one() -> None:
    from torch._inductor import metrics

    torch._dynamo.reset()
    metrics.reset()
    fused = merging.choose(CPU, BF16, 4, 16, "always")
    assert fused is not merge
    graphs = len(merging._TEST_CALLS)
    assert metrics.generated_kernel_count <= graphs, "one pass over the output"
    out, lse = torch.randn(40, 4, 16), torch.randn(4, 40).T
    part_out, part_lse = torch.randn(33, 4, 16).to(BF16), torch.randn(4, 33).T
    expected = out.clone(), lse.clone()
    fused(out[3:36], lse[3:36], part_out, part_lse)
    merge(expected[0][3:36], expected[1][3:36], part_out, part_lse)
    torch.testing.assert_close((out, lse), expected, rtol=1e-6, atol=1e-6)


def test_no_block_of_a_run_is_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """HDP has new numbers of tokens in every step, and teams and packed blocks new strides; the calls of the self-test
    must be all that is compiled."""
    made: list[torch.fx.GraphModule] = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Tensor]:
        made.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiler))
    torch._dynamo.reset()
    fused = merging.choose(CPU, BF16, 4, 16, "always")
    before = len(made)
    assert before == len(merging._TEST_CALLS)
    generator = random.Random(0)
    for grad in (True, False):  # False in the forward pass of an autograd function
        for _ in range(100):
            total = generator.randrange(2, 200)
            start = generator.choice([0, generator.randrange(total)])
            stop = generator.choice([total, generator.randrange(start, total) + 1])
            packed = stop - start + generator.choice([0, 7])  # rows of all blocks of the call
            lse = generator.choice([torch.randn(4, total).T, torch.randn(total, 4)])
            part_out, part_lse = torch.randn(packed, 4, 16).to(BF16), torch.randn(4, packed).T
            if generator.random() < 0.3:  # of a mate: one message
                message = torch.randn(packed, 4, 17)
                part_out, part_lse = message[..., :-1], message[..., -1]
            rows, part = slice(start, stop), slice(packed - (stop - start), packed)
            with torch.set_grad_enabled(grad):
                fused(torch.randn(total, 4, 16)[rows], lse[rows], part_out[part], part_lse[part])
    assert len(made) == before


def wrong(*inputs: Any) -> None:
    merge(*inputs)
    inputs[1].mul_(1.1)


def broken(*inputs: Any) -> None:
    raise RuntimeError("Triton is not there")


@pytest.mark.parametrize(("found", "why"), [(wrong, "its log-sum-exp is off"), (broken, "Triton is not there")])
def test_the_plain_merge_serves_where_the_compiled_one_does_not(
    found: Merge, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(merging, "_compiled", lambda: found)
    assert merging.choose(CPU, BF16, 4, 16, "always") is merge
    assert why in caplog.text and caplog.records[0].levelno == logging.WARNING
