"""What data sheets promise of a machine, times the share of it that large models commonly reach.

Nominal, and called so wherever it is shown, until `profile-hardware` measures the machine itself. Peaks, of which
MFU is a share of the first:
- A100 SXM 80 GB: 312 TFLOP/s dense bf16, 2.039 TB/s, NVLink 600 GB/s (300 each way), PCIe 4 x16; DGX A100: 8 network
  cards of 200 Gb/s. https://www.nvidia.com/en-us/data-center/a100/
- H100 SXM: 989 TFLOP/s, 3.35 TB/s, NVLink 900 GB/s (450 each way), PCIe 5 x16; DGX H100: 8 network cards of 400 Gb/s.
  https://www.nvidia.com/en-us/data-center/h100/
- H200 SXM: as H100, with 4.8 TB/s. https://www.nvidia.com/en-us/data-center/h200/
The shares (`_REACHED`) and the fixed times are assumptions; a CPU core's figures are round ones.

`latency_s` is what a message takes however short it is: a constant of software and wire, no share of a bandwidth, so
one figure serves inside a node and between nodes. NCCL's own model of a ring (src/graph/tuning.cc, protocol Simple) has
3.4 us a hop over NVLink and, by version, 9.6 to 14 us over a network; 10 us is the network's.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.cost.calibration import Calibration


@dataclass(frozen=True)
class _Sheet:
    """Peaks of one GPU, in FLOP/s and bytes/s; links each way."""

    device: str
    flops: float
    memory: float
    nvlink: float
    network: float
    pcie: float
    source: str


_REACHED = {"linear": 0.6, "attention": 0.5, "link": 0.8}
_SHEETS = {
    "a100x8": _Sheet(
        "A100 SXM 80GB", 312e12, 2.039e12, 300e9, 25e9, 32e9, "https://www.nvidia.com/en-us/data-center/a100/"
    ),
    "h100x8": _Sheet("H100 SXM", 989e12, 3.35e12, 450e9, 50e9, 64e9, "https://www.nvidia.com/en-us/data-center/h100/"),
    "h200x8": _Sheet("H200 SXM", 989e12, 4.8e12, 450e9, 50e9, 64e9, "https://www.nvidia.com/en-us/data-center/h200/"),
}


def nominal(cluster: str) -> Calibration:
    """Return the data-sheet calibration of a cluster preset; that of a CPU core for any other name."""
    sheet = _SHEETS.get(cluster)
    return _gpu(cluster, sheet) if sheet is not None else _cpu(cluster)


def sheet_peak(cluster: str) -> float | None:
    """Return the FLOP/s that the data sheet of a cluster preset promises; None where there is no sheet."""
    sheet = _SHEETS.get(cluster)
    return None if sheet is None else sheet.flops


def _gpu(cluster: str, sheet: _Sheet) -> Calibration:
    linear = _REACHED["linear"] * sheet.flops
    link = _REACHED["link"]
    return Calibration(
        cluster=cluster,
        device=sheet.device,
        source=f"data sheet: {sheet.source}",
        peak_flops_per_s=sheet.flops,
        linear_flops_per_s=linear,
        linear_backward=2.0,
        attention_flops_per_s=_REACHED["attention"] * sheet.flops,
        attention_backward=2.5,  # five products instead of two
        half_tokens=linear / sheet.memory,  # a bf16 weight is 2 bytes and 2 operations a token
        micro_batch_s=1e-3,
        layer_s=60e-6,
        sequence_s=1e-6,
        round_s=20e-6,
        merge_bytes_per_s=_REACHED["link"] * sheet.memory,
        latency_s=10e-6,
        node_bytes_per_s=link * sheet.nvlink,
        network_bytes_per_s=link * sheet.network,
        nics_per_node=8.0,
        overlap=1.0,
        copy_bytes_per_s=link * sheet.pcie,
        reduce_bytes_per_s=link * sheet.nvlink,
        memory_bytes_per_s=link * sheet.memory,
        step_s=20e-3,
        saved_ratio=1.0,
    )


def _cpu(cluster: str) -> Calibration:
    return Calibration(
        cluster=cluster,
        device="a CPU core",
        source="round figures",
        peak_flops_per_s=50e9,
        linear_flops_per_s=30e9,
        linear_backward=2.0,
        attention_flops_per_s=15e9,
        attention_backward=2.5,
        half_tokens=16.0,
        micro_batch_s=2e-3,
        layer_s=500e-6,
        sequence_s=50e-6,
        round_s=200e-6,
        merge_bytes_per_s=5e9,
        latency_s=100e-6,
        node_bytes_per_s=1e9,
        network_bytes_per_s=1e9,
        nics_per_node=1.0,
        overlap=0.5,
        copy_bytes_per_s=5e9,
        reduce_bytes_per_s=1e9,
        memory_bytes_per_s=5e9,
        step_s=10e-3,
        saved_ratio=1.0,
    )
