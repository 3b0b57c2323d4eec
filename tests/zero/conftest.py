from __future__ import annotations

import shutil

import pytest

from engine.config.load import load
from engine.launch.host_adam import check_host_adam


@pytest.fixture(scope="session")
def host_adam() -> None:
    """Compile DeepSpeedCPUAdam before any world starts: compiling on the ranks would take longer than their timeout."""
    if not (shutil.which("g++") or shutil.which("c++")):
        pytest.skip("no C++ compiler")
    check_host_adam(load(["optimizer.on_host=true"]), print)
