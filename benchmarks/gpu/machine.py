"""What this machine has: versions, the GPU, memory, packages, and the kernels that training selects.

`python benchmarks/gpu/machine.py [--json FILE]`; the exit code is 1 if a package is missing, and 3 without a CUDA
device.
"""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu import on_gpu

OPTIONAL = ("flash-attn", "flash-attn-3", "flash-attn-4", "liger-kernel", "triton", "pytest")
HEAD_DIM = 128


def main() -> None:
    """Print what was found, a line per item."""
    options = on_gpu.parse_options(__doc__)
    device = on_gpu.device_of(options)
    found = facts(device)
    try:
        found["kernel"], found["rejected"] = attention_kernel(device)
    except Exception as error:
        found |= on_gpu.failed({"case": "attention kernel"}, error)
    for key, value in found.items():
        print(f"{key}: {value}")
    on_gpu.write(options.json, device, **found)
    on_gpu.leave([found])


def facts(device: torch.device) -> dict[str, Any]:
    """Versions, devices and memory in bytes."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "cores": os.cpu_count(),
        "host_memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "packages": {name: version(name) for name in ("deepspeed", "numba", "hydra-core", "pydantic", *OPTIONAL)},
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpus": torch.cuda.device_count(),
            "device_memory": properties.total_memory,
            "sms": properties.multi_processor_count,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": torch.cuda.nccl.version(),
        }
    return found


def version(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def attention_kernel(device: torch.device) -> tuple[str, list[str]]:
    """Return the attention kernel that training selects in bf16, and why the others were rejected."""
    from engine.attention.kernels.choice import choose  # may lack a package, which `packages` then shows

    chosen = choose(device, torch.bfloat16, HEAD_DIM)
    return f"{chosen.name}: {chosen.reason}", list(chosen.rejected)


if __name__ == "__main__":
    main()
