from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from engine.config.load import load
from engine.cost.calibration import FP8_SPEEDUP, LINEAR_TERMS, SCHEMA, alike, read
from engine.cost.datasheets import nominal
from engine.cost.model import known_peak
from engine.errors import ConfigError
from engine.job import Job

OURS = replace(nominal("local"), source="measured", **alike(1.25e10), overlap=0.3, step_s=0.0)

NEW = ("plan_build_s", "fp8_speedup")  # since the first files of this format
FORMAT_3 = Path(__file__).with_name("calibration_3.json")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    OURS.write(tmp_path / "calibration.json")
    return tmp_path / "calibration.json"


def changed(file: Path, **changes: Any) -> Path:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return file


def refusal(path: Path, cluster: str = "local") -> str:
    with pytest.raises(ConfigError) as caught:
        read(path, cluster)
    (problem,) = caught.value.problems
    assert problem.key == "cluster.calibration" and problem.hint and str(path) in problem.message
    return problem.message


def test_what_was_written_is_read(file: Path) -> None:
    assert read(file, "local") == OURS
    assert json.loads(file.read_text()) == {"schema": SCHEMA, **asdict(OURS)}


def test_whole_numbers_are_numbers(file: Path) -> None:
    """As floats: compiled code knows no other, and would be compiled anew."""
    found = read(changed(file, nics_per_node=2, overlap=1), "local")
    assert (found.nics_per_node, found.overlap) == (2.0, 1.0)
    assert {type(found.nics_per_node), type(found.overlap)} == {float}


def test_a_file_of_format_3_has_its_one_rate_for_all_linear_layers() -> None:
    written = json.loads(FORMAT_3.read_text())
    found = read(FORMAT_3, "h200x8")
    same = {name: value for name, value in written.items() if name in asdict(found)}
    assert asdict(found) == {**same, **alike(6.5e14), "fp8_speedup": FP8_SPEEDUP}
    assert written.keys() - asdict(found).keys() == {"schema", "linear_flops_per_s"}


def test_a_fault_in_a_file_of_format_3_is_named_as_there(tmp_path: Path) -> None:
    file, found = tmp_path / "calibration.json", json.loads(FORMAT_3.read_text())
    file.write_text(json.dumps(found | {"linear_flops_per_s": 0}))
    assert "linear_flops_per_s must be from 1e-12 to 1e+30, not 0" in refusal(file, "h200x8")
    del found["linear_flops_per_s"]
    file.write_text(json.dumps(found | {"ffn_flops_per_s": 1e14}))
    assert "terms missing: linear_flops_per_s; unknown: ffn_flops_per_s" in refusal(file, "h200x8")


def test_each_kind_of_linear_layers_has_its_own_rate(file: Path) -> None:
    rates = dict(zip(LINEAR_TERMS, (1e10, 2e10, 3e10, 4e10), strict=True))
    found = read(changed(file, **rates), "local")
    assert [found.linear(kind) for kind in ("projection", "ffn", "expert", "head")] == [*rates.values()]
    assert "terms missing: none; unknown: linear_flops_per_s" in refusal(changed(file, linear_flops_per_s=1e10))


@pytest.mark.parametrize("name", NEW)
def test_a_file_of_an_earlier_version_gets_the_nominal_value_of_a_new_term(file: Path, name: str) -> None:
    found = json.loads(file.read_text())
    del found[name]
    file.write_text(json.dumps(found))
    assert asdict(read(file, "local")) == asdict(OURS) | {name: getattr(nominal("h100x8"), name)}


@pytest.mark.parametrize("name", [name for name in asdict(OURS) if name not in NEW])
def test_each_missing_term_is_named(file: Path, name: str) -> None:
    """A term that silently kept a default would make every plan wrong."""
    found = json.loads(file.read_text())
    del found[name]
    file.write_text(json.dumps(found))
    assert f"terms missing: {name}; unknown: none" in refusal(file)


def test_an_unknown_term_is_named(file: Path) -> None:
    assert "terms missing: none; unknown: speed" in refusal(changed(file, speed=1.0))


def test_a_calibration_of_another_cluster(file: Path) -> None:
    assert "it was made for cluster=local, not for cluster=h200x8" in refusal(file, "h200x8")


@pytest.mark.parametrize(
    ("name", "value", "must"),
    [
        ("ffn_flops_per_s", 0, "must be from 1e-12 to 1e+30, not 0"),
        ("ffn_flops_per_s", -1.5, "must be from 1e-12 to 1e+30, not -1.5"),
        ("ffn_flops_per_s", "fast", "must be a number, not 'fast'"),
        ("ffn_flops_per_s", True, "must be a number, not True"),
        ("ffn_flops_per_s", None, "must be a number, not None"),
        ("node_bytes_per_s", float("inf"), "is not a number"),
        ("node_bytes_per_s", 10**400, "is not a number"),
        ("node_bytes_per_s", 10**300, "must be from 1e-12 to 1e+30, not 1000"),
        ("latency_s", float("nan"), "is not a number"),
        ("latency_s", -1e-6, "must be from 0 to 1e+30, not -1e-06"),
        ("copy_bytes_per_s", 1e-300, "must be from 1e-12 to 1e+30, not 1e-300"),
        ("overlap", 1.01, "must be from 0 to 1, not 1.01"),
        ("device", 3, "must be text, not 3"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name(file: Path, name: str, value: object, must: str) -> None:
    assert f"{name} {must}" in refusal(changed(file, **{name: value}))


def test_zero_costs_are_costs(file: Path) -> None:
    seconds = ("micro_batch_s", "layer_s", "sequence_s", "round_s", "ring_s", "latency_s", "step_s")
    names = (*seconds, "half_tokens", "overlap")
    found = read(changed(file, **dict.fromkeys(names, 0)), "local")
    assert [getattr(found, name) for name in names] == [0] * len(names)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "7", '{"schema": 1}', "{}"])
def test_what_is_no_calibration(file: Path, text: str) -> None:
    file.write_text(text)
    refusal(file)


def test_an_unfinished_file_is_refused_with_its_line(file: Path) -> None:
    file.write_text('{\n"schema": 4')
    assert f"{file}:2 " in refusal(file)


@pytest.mark.parametrize("number", [SCHEMA + 1, 0, -1, "two", None])
def test_a_newer_format_or_one_that_never_was_is_refused_with_its_number(file: Path, number: object) -> None:
    file.write_text(json.dumps({"schema": number, **asdict(OURS), "new_s": 1}))
    assert str(number) in refusal(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    refusal(tmp_path / "none.json")


def test_a_file_that_is_no_text(file: Path) -> None:
    file.write_bytes(b"\xff\xfe\x00")
    assert "it is UTF-16" in refusal(file)


def test_costs_come_from_the_file_that_the_config_names(file: Path) -> None:
    costs = Job(load([f"cluster.calibration={file}"])).costs
    assert costs.source == "a CPU core (measured)"
    assert costs.peak_flops_per_s == OURS.peak_flops_per_s
    assert known_peak(load([f"cluster.calibration={file}"])) == OURS.peak_flops_per_s
    assert known_peak(load(["cluster=local"])) is None and known_peak(load(["cluster=h100x8"])) == 989e12
