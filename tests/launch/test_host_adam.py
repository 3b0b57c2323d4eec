from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engine.config.load import load
from engine.errors import ConfigError
from engine.launch import host_adam
from engine.launch.host_adam import check_host_adam


def test_a_missing_compiler_is_reported_before_any_rank_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))  # where nothing is compiled yet
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    with pytest.raises(ConfigError, match=r"cannot compile DeepSpeedCPUAdam: .*c\+\+: not found") as caught:
        check_host_adam(load(["optimizer.on_host=true"]), lambda line: None)
    problem = caught.value.problems[0]
    assert (problem.key, caught.value.code) == ("optimizer.on_host", 2)
    assert "install ninja and a C++ compiler, or set optimizer.on_host=false" in str(problem.hint)


def test_a_compiler_that_hangs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_adam, "_PROGRAM", (sys.executable, "-c", "import time; time.sleep(60)"))
    monkeypatch.setattr(host_adam, "_TIMEOUT_S", 0.1)
    with pytest.raises(ConfigError, match="may have left a lock"):
        check_host_adam(load(["optimizer.on_host=true"]), lambda line: None)


@pytest.mark.parametrize("keys", [[], ["optimizer=sgd", "optimizer.on_host=true"]])
def test_only_adamw_on_the_host_is_compiled(keys: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_adam, "_PROGRAM", ("there is no such program",))
    said: list[str] = []
    check_host_adam(load(keys), said.append)
    assert said == []
