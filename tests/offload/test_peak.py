from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.offload.peak import peak_bytes


def test_a_process_on_a_cpu_is_all_that_is_resident(tmp_path: Path) -> None:
    status = tmp_path / "status"
    assert peak_bytes(torch.device("cpu"), status) is None
    status.write_text("Name:\tpython\nVmPeak:\t  999 kB\nVmHWM:\t  123 kB\nVmRSS:\t 100 kB\n")
    assert peak_bytes(torch.device("cpu"), status) == 123 * 1024
    here = peak_bytes(torch.device("cpu"))
    assert here is None or here > 10**7


@pytest.mark.gpu
def test_a_gpu_counts_its_tensors() -> None:
    device = torch.device("cuda")
    torch.cuda.reset_peak_memory_stats()
    kept = torch.empty(1 << 26, dtype=torch.uint8, device=device)
    assert (peak_bytes(device) or 0) >= len(kept)
