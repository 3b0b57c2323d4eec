from __future__ import annotations

from types import ModuleType

import pytest
import torch

from benchmarks import gpu_attention, gpu_train


@pytest.mark.parametrize("benchmark", [gpu_attention, gpu_train])
def test_without_a_gpu_a_benchmark_of_one_leaves_with_3(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [benchmark.__name__])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as left:
        benchmark.main()
    assert left.value.code == 3
    assert "no CUDA device" in capsys.readouterr().err
