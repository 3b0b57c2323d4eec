"""`profile-hardware` measures real ranks and writes a calibration that the cost model reads."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from bytescale_cli.main import run
from bytescale_cli.profile_hardware import payload, warnings
from engine.cost.calibration import read
from engine.hardware import profile as profiling
from engine.hardware.fit import calibrate, points
from engine.hardware.profile import Profile
from tests.hardware.machines import config, measured

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a GPU")


@pytest.fixture
def found() -> Profile:
    ours = measured()
    calibration = calibrate(ours, config())
    return Profile(calibration, ours, config(), points(ours, calibration, config()), launch_bound=())


@pytest.fixture
def prepared(found: Profile, monkeypatch: pytest.MonkeyPatch) -> Profile:
    monkeypatch.setattr(profiling, "profile", lambda config, gpus, say: found)
    return found


@no_gpu
@pytest.mark.world
def test_two_ranks_are_measured_and_their_calibration_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With few repetitions and short sequences: this tests the procedure, not the figures."""
    monkeypatch.setattr(profiling, "profile", partial(profiling.profile, seconds=1.0))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    file = tmp_path / "calibration.json"
    for _ in range(3):  # as the hint says, when other programs have disturbed the timings
        code = run(
            ["profile-hardware", "cluster.device_memory=537M", "cluster.headroom=0", "--out", str(file), "--json"]
        )
        answer = json.loads(capsys.readouterr().out)
        if code == 0 or "too noisy" not in answer["error"]["message"]:
            break
    assert code == 0, answer
    hardware = answer["hardware"]
    calibration = read(file, "local")
    assert {name: hardware[name] for name in asdict(calibration)} == asdict(calibration)
    assert calibration.source == "measured"
    assert hardware["fit"]["points"] == len(hardware["measured"]) > 20
    assert hardware["kernel"] == "fused_cpu" and set(hardware["shape_build_s"]) == {"forward", "backward"}
    assert hardware["nominal"] == ["fp8_speedup", "network_bytes_per_s", "nics_per_node", "plan_build_s"]
    assert hardware["network"] is None
    assert min(hardware["copies"].values()) > 0
    assert 0 <= hardware["fit"]["median_error"] <= hardware["fit"]["worst_error"]
    assert 1e8 < calibration.attention_flops_per_s < 1e13
    assert 0 < calibration.step_s < 10
    assert calibration.peak_flops_per_s >= calibration.ffn_flops_per_s


def test_json(prepared: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "calibration.json"
    assert run(["profile-hardware", "--out", str(file), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is True
    assert set(answer["hardware"]) >= set(asdict(prepared.calibration)) | {"fit"}
    assert set(answer["hardware"]["fit"]) >= {"points", "median_error", "worst_error"}
    assert read(file, "local") == prepared.calibration


def test_people_get_a_table(prepared: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "calibration.json"
    assert run(["profile-hardware", "--out", str(file)]) == 0
    text = capsys.readouterr().out
    assert "made up, 2 ranks" in text
    assert "attention_flops_per_s" in text and "GFLOP/s" in text
    assert "median error" in text and "worst" in text
    assert "new shape takes longer by 440 ms forward, 550 ms backward" in text
    assert text.count("nominal, not measured: needs a hostfile of two nodes") == 2
    assert f"use it with cluster=local cluster.calibration={file}" in text


def test_micro_batches_that_were_not_used_are_counted(
    found: Profile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch_bound = found.measured.micro_batches[:2]
    monkeypatch.setattr(profiling, "profile", lambda config, gpus, say: replace(found, launch_bound=launch_bound))
    assert run(["profile-hardware", "--out", str(tmp_path / "calibration.json")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "not used: 2 launch-bound ones (the time of launching kernels" in said
    shown = payload(replace(found, launch_bound=launch_bound))["launch_bound"]
    assert shown == [{"micro_batch": str(case), "measured_s": timing.total_s} for case, timing in launch_bound]
    assert payload(found)["launch_bound"] == []


def test_large_errors_are_warned_of(found: Profile) -> None:
    assert warnings(found) == []
    wrong = [replace(point, predicted_s=0.7 * point.measured_s) for point in found.points]
    assert [text.partition(":")[0] for text in warnings(replace(found, points=wrong))] == [
        "the median error of the cost model is 30%",
        "the largest error of the cost model is -30%",
    ]
    busy = [(case, replace(timing, spread=0.5)) for case, timing in found.measured.micro_batches]
    disturbed = replace(found, measured=replace(found.measured, micro_batches=tuple(busy)))
    assert warnings(disturbed)[0].startswith("the machine was busy")


def test_the_fit_is_in_the_payload(found: Profile) -> None:
    assert payload(found)["fit"] == {
        "points": len(found.points),
        "median_error": found.median_error,
        "worst_error": abs(found.worst.error),
    }


@pytest.mark.parametrize("name", ["none/calibration.json", "."])
def test_a_file_that_cannot_be_written_is_refused_before_measuring(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["profile-hardware", "--out", str(tmp_path / name)]) == 2
    said = capsys.readouterr().err
    assert "error: --out: " in said and "cannot be written" in said
    assert "measuring" not in said


def test_a_link_keeps_its_place_and_its_file_gets_the_calibration(prepared: Profile, tmp_path: Path) -> None:
    link, file = tmp_path / "link.json", tmp_path / "calibration.json"
    link.symlink_to(file)
    assert run(["profile-hardware", "--out", str(link)]) == 0
    assert link.is_symlink() and read(file, "local") == prepared.calibration


@no_gpu
@pytest.mark.parametrize(
    ("override", "code", "words"),
    [
        ("cluster=h200x8", 3, "cluster=h200x8: trains on GPUs, but CUDA finds none on this machine"),
        ("dtype=fp64", 2, "dtype=fp64: fp64 is for tests"),
        ("cluster.device_memory=1M", 10, "not even one layer"),
        ("cluster.ranks_per_nod=2", 2, "cluster.ranks_per_nod"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    tmp_path: Path, override: str, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["profile-hardware", override, "--out", str(tmp_path / "calibration.json")]) == code
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
