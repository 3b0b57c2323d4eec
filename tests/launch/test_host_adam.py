from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engine.config.load import load
from engine.config.schema import Optimizer
from engine.errors import ConfigError
from engine.launch import host_adam
from engine.launch.host_adam import check_host_adam


def optimizer(*keys: str) -> Optimizer:
    return load(["recipe=quickstart", *keys]).optimizer


def test_a_machine_without_a_compiler_is_told_before_any_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))  # where nothing is compiled yet
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    with pytest.raises(ConfigError, match=r"DeepSpeedCPUAdam cannot be compiled here: .*c\+\+: not found") as caught:
        check_host_adam(optimizer("optimizer.on_host=true"), lambda line: None)
    problem = caught.value.problems[0]
    assert (problem.key, caught.value.code) == ("optimizer.on_host", 2)
    assert "ninja and a C++ compiler; or set optimizer.on_host=false" in str(problem.hint)


def test_a_compiler_that_does_not_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_adam, "_PROGRAM", (sys.executable, "-c", "import time; time.sleep(60)"))
    monkeypatch.setattr(host_adam, "_LONGEST_S", 0.1)
    with pytest.raises(ConfigError, match="a file named lock may be left"):
        check_host_adam(optimizer("optimizer.on_host=true"), lambda line: None)


@pytest.mark.parametrize("keys", [[], ["optimizer=sgd", "optimizer.on_host=true"]])
def test_only_adamw_on_the_host_is_compiled(keys: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_adam, "_PROGRAM", ("there is no such program",))
    said: list[str] = []
    check_host_adam(optimizer(*keys), said.append)
    assert said == []
