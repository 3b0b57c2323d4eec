"""GPUs are counted by the CUDA driver; here a stand-in answers for it."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from engine.cluster.gpus import visible_gpus


class Driver:
    """Answers as libcuda does: 0 is success, anything else an error code."""

    def __init__(self, count: int, init: int = 0, counting: int = 0) -> None:
        self.count, self.init, self.counting = count, init, counting

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self.init

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = self.count
        return self.counting


@pytest.mark.parametrize(
    ("driver", "gpus"), [(Driver(8), 8), (Driver(0), 0), (Driver(8, init=803), 0), (Driver(8, counting=1), 0)]
)
def test_the_driver_counts(monkeypatch: pytest.MonkeyPatch, driver: Driver, gpus: int) -> None:
    asked: list[str] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: asked.append(name) or driver)
    assert visible_gpus() == gpus
    assert asked == ["libcuda.so.1"]


def test_without_a_driver_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert visible_gpus() == 0
