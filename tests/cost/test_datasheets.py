"""Data sheets: the figures themselves, that they are marked as what they are, and that no term is left out."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from engine.config import tree
from engine.config.load import load
from engine.cost.calibration import read
from engine.cost.datasheets import has_fp8, nominal, sheet_peak
from engine.family.parameters import LINEAR_KINDS
from engine.job import Job
from tests.presets import LLAMA7B_256K

PRESETS = tree.groups()["cluster"]
# dense bf16 TFLOP/s, memory TB/s, NVLink GB/s each way, a card's Gb/s, cards, host link GB/s each way: NVIDIA's pages
SHEETS = {
    "a100x8": (312, 2.039, 300, 200, 8, 32),
    "h100x8": (989, 3.35, 450, 400, 8, 64),
    "h200x8": (989, 4.8, 450, 400, 8, 64),
    "b200x8": (2250, 8, 900, 400, 8, 64),
    "gb200x4": (2500, 8, 900, 400, 4, 225),
}


@pytest.mark.parametrize("name", SHEETS)
def test_a_gpu_reaches_a_share_of_its_sheet(name: str) -> None:
    flops, memory, nvlink, card, cards, host = SHEETS[name]
    found = nominal(name)
    assert found.peak_flops_per_s == sheet_peak(name) == flops * 1e12
    assert [found.linear(kind) for kind in LINEAR_KINDS] == [pytest.approx(0.6 * flops * 1e12)] * 4
    assert nominal(name, head_dim=96).attention_flops_per_s == pytest.approx(0.5 * flops * 1e12)
    assert found.memory_bytes_per_s == found.merge_bytes_per_s == pytest.approx(0.8 * memory * 1e12)
    assert found.node_bytes_per_s == found.reduce_bytes_per_s == pytest.approx(0.8 * nvlink * 1e9)
    assert found.network_bytes_per_s == pytest.approx(0.8 * card / 8 * 1e9)
    assert found.copy_bytes_per_s == pytest.approx(0.8 * host * 1e9)
    assert found.nics_per_node == cards
    assert found.half_tokens == pytest.approx(0.6 * flops / memory), "as long as reading 2 bytes a weight"


def test_fp8_is_known_of_gpus_with_a_sheet() -> None:
    assert {name for name in (*PRESETS, "mine") if not has_fp8(name)} == {"a100x8"}


@pytest.mark.parametrize("name", SHEETS)
def test_it_is_marked_as_a_data_sheet_with_its_source(name: str) -> None:
    found = nominal(name)
    assert found.source.startswith("data sheet https://www.nvidia.com/")
    assert found.device.split()[0].lower() == name.rpartition("x")[0]
    recipe = [*LLAMA7B_256K, f"cluster={name}", "cluster.nodes=256"]
    assert Job(load(recipe)).costs.source == f"{found.device} ({found.source})"


def test_attention_has_the_measured_rate_of_its_head_size() -> None:
    """One H200 with cuDNN, both passes together: benchmarks/RESULTS.md, "One H200"."""
    rate = {head: nominal("h200x8", head).attention_flops_per_s / 1e12 for head in (64, 96, 128)}
    both = {head: 3.5 / (1 / forward + 2.5 / backward) for head, forward, backward in [(64, 468, 428), (128, 542, 529)]}
    assert rate == pytest.approx({64: both[64], 96: 494.5, 128: both[128]}, rel=0.01)
    assert "(measured)" in nominal("h200x8").source
    assert "(assumed)" in nominal("h200x8", 96).source and "(assumed)" in nominal("h100x8").source
    config = load(["recipe=h200-1b-8k"])
    assert config.model.head_dim == 64
    assert f"{0.44} in attention (measured)" in Job(config).costs.source


def test_newer_is_never_slower() -> None:
    for older, newer in pairwise(map(nominal, SHEETS)):
        for term in ("ffn_flops_per_s", "memory_bytes_per_s", "node_bytes_per_s", "network_bytes_per_s"):
            assert getattr(older, term) <= getattr(newer, term)


@pytest.mark.parametrize("name", [*PRESETS, "some-other"])
def test_every_preset_has_all_terms_in_bounds(name: str, tmp_path: Path) -> None:
    """The reader of calibrations is the judge: it refuses what is missing, zero or negative."""
    nominal(name).write(tmp_path / "nominal.json")
    assert read(tmp_path / "nominal.json", name) == nominal(name)


@pytest.mark.parametrize("name", ["local", "some-other"])
def test_what_has_no_sheet_is_a_cpu_core_in_round_figures(name: str) -> None:
    assert (nominal(name).cluster, nominal(name).device, nominal(name).source) == (name, "a CPU core", "round figures")
    assert nominal(name).ffn_flops_per_s < nominal(name).peak_flops_per_s < 1e12
    assert sheet_peak(name) is None
