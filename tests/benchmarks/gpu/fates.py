"""Cases of a benchmark that run, fail or die. Their processes import this module, and not a benchmark."""

from __future__ import annotations

import os
from typing import Any

from engine.errors import MemoryFitError


def fate(what: str) -> dict[str, Any]:
    """Return the process and its allocator's settings, unless it is to fail or die."""
    if what == "fail":
        raise MemoryFitError("no room\nat all", hint="less")
    if what == "die":
        os._exit(9)
    return {"process": os.getpid(), "settings": os.environ["PYTORCH_CUDA_ALLOC_CONF"]}
