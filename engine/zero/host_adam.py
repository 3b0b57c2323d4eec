"""AdamW with optimizer states in host memory: DeepSpeedCPUAdam, an operator in C++.

It is compiled once per machine, which takes minutes. PyTorch caches it in TORCH_EXTENSIONS_DIR.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.op_builder import CPUAdamBuilder
from torch.utils.cpp_extension import _get_build_directory

_OLD_S = 1200  # a lock of this age belongs to nobody: one core compiles for four minutes


def host_adamw(groups: list[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:
    """Create DeepSpeedCPUAdam as AdamW with fp32 moments, after compiling the operator if necessary.

    `groups` are PyTorch's parameter groups, `settings` the other arguments of DeepSpeedCPUAdam (lr, betas, eps).
    """
    compile_operator()
    adamw: torch.optim.Optimizer = DeepSpeedCPUAdam(groups, adamw_mode=True, fp32_optimizer_states=True, **settings)
    return adamw


def compile_operator() -> None:
    """Compile DeepSpeedCPUAdam unless it is cached. Raises RuntimeError if compilation fails.

    A lock that a killed compiler left is removed: PyTorch would wait for it without end.

    Puts the `ninja` of this Python environment first on PATH. If processes used two versions of ninja, each would
    reject the other's output and compile everything again.
    """
    ninja = shutil.which("ninja", path=Path(sys.executable).parent)
    if ninja and shutil.which("ninja") != ninja:
        os.environ["PATH"] = os.pathsep.join((str(Path(ninja).parent), os.environ.get("PATH", "")))
    builder = CPUAdamBuilder()
    lock = Path(_get_build_directory(builder.name, verbose=False)) / "lock"
    with suppress(FileNotFoundError):
        if time.time() - lock.stat().st_mtime > _OLD_S:
            lock.unlink()
    builder.load()


if __name__ == "__main__":  # `python -m engine.zero.host_adam`, which the launcher runs before any rank starts
    compile_operator()
