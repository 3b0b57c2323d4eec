"""Environment variables of ranks: which ones reach other hosts, and which one stops a launch (docs/gpu.md).

Ranks on this machine inherit the whole environment. ssh passes none of it on, but libraries read from it which network
to use, where CUDA is, or how long to wait: without these variables ranks of other hosts would behave differently. So
variables that are known to be needed are forwarded, unless it looks like a secret by its name or its value. Users add
others with BYTESCALE_FORWARD, a list of names with commas.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from engine.cluster.cluster import Cluster
from engine.cluster.hosts import is_local
from engine.config.devices import uses_gpus
from engine.config.schema import Config
from engine.config.secret import is_secret, is_secret_value
from engine.errors import Problem

_PREFIXES = (
    *("NCCL_", "GLOO_", "UCX_", "FI_"),  # networks; FI_ is libfabric, below NCCL on some clouds
    *("CUDA_", "CUDNN_", "CUBLAS_", "CUBLASLT_"),
    *("TORCH_", "PYTORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "TRITON_"),
    *("FLASH_ATTENTION_", "NUMBA_", "OMP_", "MKL_", "KMP_", "DS_BUILD_"),
)
# Prefixes of libraries that are used, and whose other variables are for downloads, uploads and services.
_LIBRARIES = ("HF_", "DS_", "DEEPSPEED_", "HUGGING", "TRANSFORMERS_", "TOKENIZERS_")
FORWARD = "BYTESCALE_FORWARD"
# XDG_CACHE_HOME: compiled code (engine/compiled.py). PATH is left to the other host: its compilers may be elsewhere.
_TO_START = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "XDG_CACHE_HOME")
_NAMES = (
    *_TO_START,
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM"),
    *("DS_ACCELERATOR", "DS_SKIP_CUDA_CHECK", "DS_IGNORE_CUDA_DETECTION"),
)
# They describe one host: which of its GPUs to use, and who it is. With one NCCL_HOSTID all hosts would seem to be one.
_PER_HOST = ("CUDA_VISIBLE_DEVICES", "NCCL_HOSTID")


class Forwarded(NamedTuple):
    """Variables for ranks on other hosts, and the names of those of libraries that stay here."""

    variables: dict[str, str]
    withheld: list[str]  # they would be among them if they did not look like secrets
    left: list[str]  # ranks are not known to need them


def forwarded(environment: Mapping[str, str], cluster: Cluster) -> Forwarded:
    """Choose the variables of `environment` that ranks on other hosts get too, in alphabetical order.

    There are none if all nodes of the cluster are this machine. What the user has named in BYTESCALE_FORWARD is
    forwarded whatever it looks like.
    """
    if all(is_local(node.host) for node in cluster.nodes):
        return Forwarded({}, [], [])
    asked = {name.strip() for name in environment.get(FORWARD, "").split(",")}
    variables, withheld, left = dict[str, str](), list[str](), list[str]()
    for name, value in sorted(environment.items()):
        if name in asked:
            variables[name] = value
        elif name in _PER_HOST or not (name in _NAMES or name.startswith((*_PREFIXES, *_LIBRARIES))):
            continue
        elif is_secret(name) or is_secret_value(value):  # ranks read local files only and need no credentials
            withheld.append(name)
        elif name in _NAMES or name.startswith(_PREFIXES):
            variables[name] = value
        else:
            left.append(name)
    return Forwarded(variables, withheld, left)


def needed_to_start(variables: Mapping[str, str]) -> dict[str, str]:
    """Return those of the forwarded variables without which Python may not start on the other host."""
    return {name: variables[name] for name in _TO_START if name in variables}


def environment_problem(config: Config, environment: Mapping[str, str]) -> Problem | None:
    """Return the problem with a variable that a run on GPUs cannot have, else None.

    CUDA_DEVICE_MAX_CONNECTIONS is the number of queues from the host to a GPU, onto which its streams are mapped (8 by
    default). With one queue, work waits behind all that was launched before it in any stream: a copy that waits for
    memory, or a message that waits for its data, holds up the kernels of the next layer. Rings, ZeRO-3's gathers and
    offload all rely on that overlap. Launch scripts of Megatron set 1 for its tensor parallelism; for FSDP it has been
    measured to serialise communication and computation (verl-omni#421), and 8 to 32 are advised (torchtitan#1147).
    """
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if not uses_gpus(config) or environment.get(name) != "1":
        return None
    message = "puts all streams of a GPU into one queue: messages and copies would not overlap with computation"
    return Problem(message, f"{name}=1", f"unset {name} (CUDA's default is 8)")
