"""The ways in which dK,dV can travel, on a small ring."""

from __future__ import annotations

import torch

from benchmarks.dkv_messages import errors, gradients
from engine.attention.kernels import cpu, reference
from tests.attention.gpu_like import GPU_LIKE


def test_the_sum_over_a_ring_is_the_gradient_of_one_call() -> None:
    exact, found = gradients(reference.backward, 4, 50, 0)
    for one in found.values():
        for x, y in zip(one, exact, strict=True):
            torch.testing.assert_close(x.double(), y, rtol=0.05, atol=0.05)


def test_a_sum_in_bf16_loses_with_the_degree_and_contributions_in_bf16_do_not_on_gpus() -> None:
    """A GPU's kernel has rounded them already, so that half of the bytes would carry the same numbers."""
    two, sixteen = (errors(GPU_LIKE.backward, degree, 256, 1) for degree in (2, 16))
    assert min(sixteen["bf16 sum"]) > 1.5 * max(two["bf16 sum"])
    assert sixteen["bf16 to owner"] == sixteen["fp32 sum"]
    on_cpu = errors(cpu.load().backward, 16, 256, 1)
    assert min(on_cpu["bf16 to owner"]) > 1.05 * max(on_cpu["fp32 sum"])
