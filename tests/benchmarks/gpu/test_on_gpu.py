from __future__ import annotations

import os

import pytest

from benchmarks.gpu import on_gpu
from benchmarks.gpu.on_gpu import alone
from tests.benchmarks.gpu.fates import fate

pytestmark = pytest.mark.long


def test_each_case_has_its_process_and_its_fate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the settings under which the estimate holds; a case that fails or dies is told, and others go on."""
    monkeypatch.setattr(on_gpu, "ALLOCATORS", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    failed, died, found = (alone({"case": what}, fate, what) for what in ("fail", "die", "run"))
    assert failed == {"case": "fail", "error": "MemoryFitError: no room"}
    assert died["case"] == "die" and died["error"].startswith("BrokenProcess")
    assert found["process"] != os.getpid()
    assert (found["case"], found["settings"]) == ("run", "expandable_segments:True")
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "- fail: failed: MemoryFitError: no room" and told[1].startswith("- die: failed: BrokenProcess")
