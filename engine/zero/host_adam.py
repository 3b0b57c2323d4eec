"""AdamW whose states wait on the host: DeepSpeed's own, in C++.

A machine compiles it once, for minutes; PyTorch keeps it in its folder of extensions (TORCH_EXTENSIONS_DIR).
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.op_builder import CPUAdamBuilder


def host_adamw(groups: list[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:
    """Return DeepSpeedCPUAdam as AdamW with fp32 moments, compiled first if need be."""
    compiled()
    adamw: torch.optim.Optimizer = DeepSpeedCPUAdam(groups, adamw_mode=True, fp32_optimizer_states=True, **settings)
    return adamw


def compiled() -> None:
    """Compile DeepSpeedCPUAdam if that was not done yet. Raises RuntimeError where it cannot be.

    Always with the ninja beside this Python, on the path or not: another version would compile all anew, and so on.
    """
    beside = shutil.which("ninja", path=Path(sys.executable).parent)
    if beside and shutil.which("ninja") != beside:
        os.environ["PATH"] = os.pathsep.join((str(Path(beside).parent), os.environ.get("PATH", "")))
    CPUAdamBuilder().load()


if __name__ == "__main__":  # `python -m engine.zero.host_adam`, which the launcher runs before any rank starts
    compiled()
