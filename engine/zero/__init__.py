"""DeepSpeed: ZeRO, its optimizers and checkpoints."""

import sys
from typing import Any

_modules: dict[str, Any] = sys.modules
if "mlflow" not in _modules:
    # DeepSpeed imports its autotuner, and that imports MLflow if it is installed: 1 s and 60 MB in each rank, for
    # nothing. None makes an import fail as if it were not installed.
    _modules["mlflow"] = None
    import deepspeed  # noqa: F401

    del _modules["mlflow"]
