"""Rates from data sheets, scaled by the fraction of the peak that large models commonly reach.

They are used, and shown as nominal, until `profile-hardware` measures the machine. Peaks are for dense bf16; MFU is
relative to the peak FLOP/s:
- A100 SXM 80 GB: 312 TFLOP/s, 2.039 TB/s, NVLink 600 GB/s (300 each way), PCIe 4 x16; DGX A100: 8 network
  cards of 200 Gb/s. https://www.nvidia.com/en-us/data-center/a100/
- H100 SXM: 989 TFLOP/s, 3.35 TB/s, NVLink 900 GB/s (450 each way), PCIe 5 x16; DGX H100: 8 network cards of 400 Gb/s.
  https://www.nvidia.com/en-us/data-center/h100/
- H200 SXM: as H100, with 4.8 TB/s. https://www.nvidia.com/en-us/data-center/h200/
- B200 (HGX and DGX B200): 2,250 TFLOP/s (4,500 with sparsity), 8 TB/s, NVLink 1.8 TB/s (900 GB/s each way), PCIe 5 x16;
  8 network cards of 400 Gb/s. https://www.nvidia.com/en-us/data-center/dgx-b200/
- GB200 NVL72, a compute tray of 4: 2,500 TFLOP/s (5,000 with sparsity), 8 TB/s, NVLink as B200; NVLink-C2C
  to Grace 900 GB/s (450 each way) for two GPUs; 4 network cards of 400 Gb/s. https://www.nvidia.com/en-us/data-center/gb200-nvl72/
The FP8 peaks of H100, H200, B200 and GB200 are twice those of bf16 (1,979, 1,979, 4,500 and 5,000 TFLOP/s, dense); an
A100 has no FP8. That linear layers in FP8, with the time to scale and round their operands, are 1.5 times as fast is an
assumption (`FP8_SPEEDUP`).
The fractions (`_REACHED`) and the fixed times are assumptions; a CPU core's figures are round ones. Attention on an
H200 was measured with cuDNN, forward and backward together (benchmarks/RESULTS.md, "One H200"): with a head size of 128
533 TFLOP/s at 128K and 537 at 32K, with 64 439 at 64K.

`latency_s` is the fixed time of a message of any size: a constant of software and wire, not a fraction of a bandwidth,
so one value is used inside a node and between nodes. NCCL's model of a ring (src/graph/tuning.cc, protocol
Simple) has 3.4 us a hop over NVLink and, by version, 9.6 to 14 us over a network; 10 us is the network's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.cost.calibration import FP8_SPEEDUP, PLAN_BUILD_S, Calibration, alike


@dataclass(frozen=True)
class _Sheet:
    """Peaks of one GPU, in FLOP/s and bytes/s; links each way. `host` is the link to the host, `network` one card's."""

    device: str
    flops: float
    memory: float
    nvlink: float
    network: float
    host: float
    source: str
    network_cards: float = 8.0  # per node
    attention: Mapping[int, float] = field(default_factory=dict)  # measured fraction of the peak, by head size
    fp8: bool = True


_REACHED = {"linear": 0.6, "attention": 0.5, "link": 0.8}
_NVIDIA = "https://www.nvidia.com/en-us/data-center"
_SHEETS = {
    "a100x8": _Sheet("A100 SXM 80GB", 312e12, 2.039e12, 300e9, 25e9, 32e9, f"{_NVIDIA}/a100/", fp8=False),
    "h100x8": _Sheet("H100 SXM", 989e12, 3.35e12, 450e9, 50e9, 64e9, f"{_NVIDIA}/h100/"),
    "h200x8": _Sheet(
        "H200 SXM", 989e12, 4.8e12, 450e9, 50e9, 64e9, f"{_NVIDIA}/h200/", attention={64: 0.44, 128: 0.54}
    ),
    "b200x8": _Sheet("B200 SXM", 2250e12, 8e12, 900e9, 50e9, 64e9, f"{_NVIDIA}/dgx-b200/"),
    # Trays of one rack share NVLink, but are modelled as nodes with network cards: rates between trays are too low.
    "gb200x4": _Sheet("GB200", 2500e12, 8e12, 900e9, 50e9, 225e9, f"{_NVIDIA}/gb200-nvl72/", network_cards=4.0),
}


def nominal(cluster: str, head_dim: int = 128) -> Calibration:
    """The data-sheet rates of a cluster preset; assumed rates of a CPU core for any other name.

    The rate of attention depends on the head size where that was measured.
    """
    sheet = _SHEETS.get(cluster)
    if sheet is None:
        return Calibration(
            cluster=cluster,
            device="a CPU core",
            source="round figures",
            peak_flops_per_s=50e9,
            **alike(30e9),
            fp8_speedup=0.2,  # emulated: PyTorch rounds, and multiplies in float32
            linear_backward=2.0,
            attention_flops_per_s=15e9,
            attention_backward=2.5,
            half_tokens=16.0,
            micro_batch_s=2e-3,
            layer_s=500e-6,
            gather_s=5e-3,
            sequence_s=50e-6,
            round_s=150e-6,
            ring_s=50e-6,
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
            plan_build_s=0.0,
        )
    linear, link = _REACHED["linear"] * sheet.flops, _REACHED["link"]
    attention = sheet.attention.get(head_dim, _REACHED["attention"])
    known = "measured" if head_dim in sheet.attention else "assumed"
    shares = (
        f"at {_REACHED['linear']} of its peak in linear layers, {attention} in attention ({known}), {link} of links"
    )
    return Calibration(
        cluster=cluster,
        device=sheet.device,
        source=f"data sheet {sheet.source} {shares}",
        peak_flops_per_s=sheet.flops,
        **alike(linear),
        fp8_speedup=FP8_SPEEDUP,
        linear_backward=2.0,
        attention_flops_per_s=attention * sheet.flops,
        attention_backward=2.5,  # five products instead of two
        half_tokens=linear / sheet.memory,  # a bf16 weight is 2 bytes and 2 operations a token
        micro_batch_s=1e-3,
        layer_s=60e-6,
        gather_s=0.0,  # not known; the host runs ahead of long kernels
        sequence_s=1e-6,
        round_s=10e-6,
        ring_s=10e-6,
        merge_bytes_per_s=_REACHED["link"] * sheet.memory,
        latency_s=10e-6,
        node_bytes_per_s=link * sheet.nvlink,
        network_bytes_per_s=link * sheet.network,
        nics_per_node=sheet.network_cards,
        overlap=1.0,
        copy_bytes_per_s=link * sheet.host,
        reduce_bytes_per_s=link * sheet.nvlink,
        memory_bytes_per_s=link * sheet.memory,
        step_s=20e-3,
        plan_build_s=PLAN_BUILD_S,
    )


def sheet_peak(cluster: str) -> float | None:
    """Peak FLOP/s of a device by the data sheet of a cluster preset, or None if there is no sheet."""
    sheet = _SHEETS.get(cluster)
    return None if sheet is None else sheet.flops


def has_fp8(cluster: str) -> bool:
    """Whether devices compute in FP8, by the data sheet of a cluster preset; True if there is no sheet.

    CPU ranks emulate it. A GPU without a sheet is asked when a run starts (engine/models/common/fp8.py).
    """
    sheet = _SHEETS.get(cluster)
    return sheet is None or sheet.fp8
