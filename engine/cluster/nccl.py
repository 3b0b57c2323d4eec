"""Which version of NCCL a job needs, and the test mode with several ranks on one GPU. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from engine.errors import Problem

if TYPE_CHECKING:
    from engine.config.schema import Config

# The test mode: all ranks of a host use its first GPU. They take turns, and each holds its tensors in the same memory.
ONE_GPU = "BYTESCALE_ONE_GPU"
# For NCCL in this mode, unless already set. It refuses two ranks on a GPU by default; 2 CTAs for each communicator let
# kernels of all ranks be on the GPU at once, and NVLink SHARP needs several GPUs.
OF_ONE_GPU = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
}
_SHARES_GPU = (2, 30)  # the first NCCL with NCCL_MULTI_RANK_GPU_ENABLE
_KEEPS_ORDER = (2, 26)  # the first one with NCCL_LAUNCH_ORDER_IMPLICIT


def shares_gpu(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether all ranks of a host use its first GPU, for tests and benchmarks; by the environment of its processes."""
    return environment.get(ONE_GPU, "0") not in ("", "0")


def needs_order(config: Config) -> bool:
    """Whether a rank has kernels of two communicators in flight at once.

    | key | beside rings of K,V, or beside each other |
    |---|---|
    | `zero.stage=2` | gradients of a pass are reduced |
    | `zero.stage=3` | weights are gathered too |
    | `parallel.pp` | stages exchange activations |
    | `parallel.tp` | slices of rows are gathered and reduced; in a last pass without rings also gradients are |
    | `parallel.ep` | rows travel to experts, and the gradients of experts are reduced over fewer ranks than others |

    All ranks launch them in an order that cannot deadlock. Only with NCCL_LAUNCH_ORDER_IMPLICIT NCCL keeps that order
    on the device (NVIDIA/nccl#522).

    ZeRO-1 alone does not need it. A rank reduces after its last ring, whose results its gradients have waited for, and
    its next ring waits for the weights that the update has gathered.
    """
    return bool(_at_once(config))


def _at_once(config: Config) -> dict[str, int]:
    """The keys for which a config needs the order, with their values. None does where all are 1."""
    parallel = config.parallel
    found = {"zero.stage": config.zero.stage, "parallel.pp": parallel.pp, "parallel.tp": parallel.tp}
    return {key: value for key, value in {**found, "parallel.ep": parallel.ep}.items() if value > 1}


def nccl_problem(config: Config, ranks: int, found: Sequence[int], host: str) -> Problem | None:
    """Return the problem if NCCL of version `found`, on `host`, is too old for a job on `ranks` GPUs, else None."""
    text = ".".join(map(str, found))
    if ranks > 1 and shares_gpu() and tuple(found) < _SHARES_GPU:
        message = f"{host}: NCCL {text} cannot run several ranks on one GPU, which needs 2.30 or newer"
        return Problem(message, f"{ONE_GPU}=1", "install a PyTorch with a newer NCCL, or set LD_PRELOAD to its library")
    if ranks > 1 and needs_order(config) and tuple(found) < _KEEPS_ORDER:
        keys = _at_once(config)
        key, instead = next(f"{key}={value}" for key, value in keys.items()), " ".join(f"{key}=1" for key in keys)
        message = (
            f"{host}: NCCL {text} does not keep the order of kernels of several groups, so that {key} may deadlock"
        )
        return Problem(message, key, f"install a PyTorch with NCCL 2.26 or newer, or set {instead}")
    return None
