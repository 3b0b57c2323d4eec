"""Settings that all tests share."""

from __future__ import annotations

import copy
import functools
import gc
import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import engine.config.compose
import engine.data.pack

# A machine that is busy with something else is no error.
settings.register_profile("bytescale", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("bytescale")


def pytest_configure(config: pytest.Config) -> None:
    """Hide the machine's GPUs from all tests but those marked gpu: on some machines they would not run on CPUs.

    PyTorch and DeepSpeed choose a GPU wherever they see one. Both read this variable when they first look.
    """
    if "gpu" not in config.getoption("markexpr").replace("not gpu", ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="session", autouse=True)
def composed_once() -> Iterator[None]:
    """Let Hydra compose the same overrides once: it needs a tenth of a second, and tests ask 2,000 times."""
    composed = functools.cache(engine.config.compose.compose)  # of mistakes nothing is kept

    def compose(overrides: Sequence[str]) -> dict[str, Any]:
        return copy.deepcopy(composed(tuple(overrides)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.config.compose, "compose", compose)
        yield


@pytest.fixture(scope="session", autouse=True)
def token_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep token files of tests out of the user's cache folder."""
    folder = tmp_path_factory.mktemp("tokens")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.data.pack, "cache_folder", lambda data: folder)
        yield


def pytest_collection_finish() -> None:
    """Leave out of garbage collection what is there for the whole session: the libraries' objects, and the tests."""
    gc.collect()
    gc.freeze()
