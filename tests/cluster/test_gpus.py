"""The CUDA driver counts GPUs and knows their memory; here a stand-in answers for it."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.cluster import gpus
from engine.cluster.gpus import Gpu, driver_version, gpus_seen, least_gpu_memory, pytorch_without_cuda, visible_gpus


class Driver:
    """Answers as libcuda does: 0 is success, anything else an error code."""

    def __init__(
        self, count: int, init: int = 0, counting: int = 0, memories: tuple[int, ...] = (), measuring: int = 0
    ) -> None:
        self.count, self.init, self.counting = count, init, counting
        self.memories, self.measuring = memories, measuring

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self.init

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = self.count
        return self.counting

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802
        version._obj.value = 12080
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:  # noqa: N802
        device._obj.value = 100 + ordinal
        return 0

    def cuDeviceTotalMem_v2(self, memory: Any, device: ctypes.c_int) -> int:  # noqa: N802
        memory._obj.value = self.memories[device.value - 100]
        return self.measuring

    def cuDeviceGetName(self, text: Any, size: int, device: ctypes.c_int) -> int:  # noqa: N802
        text.value = f"card {device.value}".encode()
        return 0

    def cuDeviceGetPCIBusId(self, text: Any, size: int, device: ctypes.c_int) -> int:  # noqa: N802
        text.value = f"0000:{device.value:X}:00.0".encode()
        return self.measuring


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
    assert least_gpu_memory() is None


def test_gpus_are_named_with_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver writes addresses in capitals, the kernel names folders in small letters."""
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(11))
    assert gpus.gpus()[10] == Gpu("card 110", "0000:6e:00.0")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(1, measuring=1))
    assert gpus.gpus() == [Gpu("card 100", "")]


def test_another_process_is_asked_and_one_that_hangs_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(gpus, "_ANSWER_S", 0.5)
    assert gpus_seen({**os.environ, "PYTHONPATH": str(tmp_path)}) is None
    monkeypatch.setattr(gpus, "_ANSWER_S", 20.0)
    assert gpus_seen({**os.environ, "CUDA_VISIBLE_DEVICES": ""}) == []


@pytest.mark.parametrize(
    ("driver", "least"),
    [
        (Driver(3, memories=(150_000_000_000, 85_000_000_000, 150_000_000_000)), 85_000_000_000),
        (Driver(1, memories=(2**37,)), 2**37),
        (Driver(0), None),
        (Driver(1, init=803), None),
        (Driver(1, memories=(1,), measuring=1), None),
    ],
)
def test_the_smallest_memory_counts(monkeypatch: pytest.MonkeyPatch, driver: Driver, least: int | None) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert least_gpu_memory() == least


@pytest.mark.parametrize(("driver", "version"), [(Driver(8), "12.8"), (Driver(0), "12.8"), (Driver(8, init=803), None)])
def test_the_driver_says_which_cuda_it_supports(
    monkeypatch: pytest.MonkeyPatch, driver: Driver, version: str | None
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert driver_version() == version


@pytest.mark.parametrize(("cuda", "found"), [("None", "2.13.0+cpu"), ("'13.0'", None)])
def test_a_pytorch_without_cuda_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: str, found: str | None
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('this takes seconds')")
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.13.0+cpu'\ncuda: str | None = {cuda}\n")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert pytorch_without_cuda() == found


def test_the_installed_pytorch_says_whether_it_has_cuda() -> None:
    import torch

    assert pytorch_without_cuda() == (None if torch.version.cuda else torch.__version__)
