"""One answer to "does it fit?", whichever command asks."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from bytescale_cli.main import run
from engine.config.load import load
from engine.config.units import parse_count
from engine.data.runtime.runtimes import RUNTIMES
from engine.fit import check, machine
from engine.fit.check import fit_error
from engine.fit.estimate import estimate
from engine.fit.largest import largest_capacity
from engine.fit.problem import fit_problem
from engine.job import Job
from engine.report.words import memory_rows
from engine.units import PPM
from tests.covering import in_turn
from tests.presets import LLAMA3_8B_256K, LLAMA7B_2M, LLAMA7B_256K

pytestmark = pytest.mark.long


def problem(*keys: str) -> tuple[str, str] | None:
    """Key and message of what does not fit, if anything."""
    config = load([*keys])
    found = fit_problem(Job(config))
    return None if found is None else (str(found.key), found.message)


@pytest.mark.parametrize("command", ["estimate-memory", "plan", "simulate"])
def test_what_no_planner_supports_is_refused_whichever_command_asks(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, *LLAMA7B_256K, "planner.max_peers=1"]) == 2
    assert "error: planner.max_peers: the " in capsys.readouterr().err


def test_a_context_that_the_ranks_do_not_hold_does_not_fit() -> None:
    assert problem("context=2K") is None
    found = problem("context=2049")
    assert found == ("context", "a sequence of 2049 tokens does not fit: 2 ranks x capacity 1K = 2K")


def test_a_ratio_that_the_host_has_no_memory_for_does_not_fit() -> None:
    keys = [*LLAMA7B_2M, "offload.ratio=0.5", "cluster.headroom=0"]
    needs = int(Job(load(keys)).settings.costs.host_bytes(np.int64(8192), PPM // 2))
    assert problem(*keys, f"cluster.host_memory={needs}") is None
    found = problem(*keys, f"cluster.host_memory={needs - 1}")
    assert found is not None and found[0] == "offload.ratio"
    assert re.match(r"offloading 0\.5 of a micro-batch of 8K tokens puts 13\.[0-9]+ GiB on the host", found[1])
    puts, has = re.findall(r"[0-9.]+ GiB", found[1])
    assert puts != has, "one byte is missing, and the message shows it"
    assert problem(*LLAMA7B_2M, "cluster.host_memory=1GiB") is None, "auto uses less"


def test_model_states_on_the_host_leave_less_for_a_ratio() -> None:
    keys = [*LLAMA7B_2M, "zero.stage=3", "optimizer.on_host=true", "offload.ratio=1", "cluster.nodes=4"]
    found = problem(*keys, "context=64K", "cluster.host_memory=28GiB")
    assert found is not None
    assert "puts 27.3 GiB on the host in addition to 4.1 GiB of model states, 31.4 GiB in total" in found[1]


def test_the_memory_of_ray_is_taken_from_that_for_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank of a node has a share of it, and `estimate-memory` shows that share."""
    monkeypatch.setitem(RUNTIMES, "ray", RUNTIMES["local"])  # type: ignore[index]
    ray = ["data.runtime=ray", "data.ray.memory=8GiB"]
    plain, shared = Job(load(LLAMA7B_2M)), Job(load([*LLAMA7B_2M, *ray]))
    assert shared.config.cluster.ranks_per_node == 8
    assert plain.settings.host_memory - shared.settings.host_memory == 1 << 30
    found, before = estimate(shared), estimate(plain)
    assert found.ray == 1 << 30 and before.ray == 0
    assert ("of it for Ray", "1.00") in [(name, size) for name, size, _ in memory_rows(found)]
    assert not any("Ray" in name for name, _, _ in memory_rows(before))
    without = [*LLAMA7B_2M, "offload.ratio=0"]
    for host in ("0", "1GiB", "1537MiB"):
        small = Job(load([*without, *ray, f"cluster.host_memory={host}"])).settings.host_memory
        assert small == max(0, int(0.97 * (parse_count(host, bytes_=True))) - (1 << 30)), "a run without offload fits"
        assert problem(*without, *ray, f"cluster.host_memory={host}") is None


def test_the_capacity_comes_before_the_context() -> None:
    """A context that the ranks could hold only with a capacity that does not fit either."""
    found = problem(*LLAMA7B_2M, "cluster.nodes=1", "offload.ratio=0", "capacity=64K")
    assert found is not None and found[0] == "cluster.device_memory"


def test_the_error_has_suggestions_in_its_hint_and_in_its_json() -> None:
    config = load(["context=8K"])
    error = fit_error(Job(config))
    assert error is not None and error.code == 10
    *hints, shorter = str(error.problems[0].hint).split("; or ")
    assert [way["set"] for way in error.found["ways"]] == hints and shorter.startswith("context=")


# Each row asks `plan` and one of these in turn; `make nightly` asks all.
OTHERS = ("simulate", "estimate-memory", "estimate-memory --fit", "profile-data", "train --dry-run", "train")


@pytest.fixture
def documents(tmp_path: Path) -> list[str]:
    """Twelve documents, one of them longer than any context below."""
    (tmp_path / "data").mkdir()
    for number in range(12):
        (tmp_path / "data" / f"{number}.txt").write_text("some words\n" * (200 if number else 6000), encoding="utf-8")
    return ["recipe=quickstart", "data=folder", f"data.path={tmp_path / 'data'}", "data.validation_tokens=0"]


def answers(
    keys: list[str], commands: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> set[tuple[int, str, str]]:
    """The exit codes, keys and messages of commands."""
    said = set()
    for command in commands:
        where = [f"run.out={tmp_path / 'run'}"] if command.startswith("train") else []
        code = run([*command.split(), *keys, *where, "--json"])
        error = json.loads(capsys.readouterr().out).get("error", {"key": "", "message": ""})
        said.add((code, error["key"], error["message"]))
    return said


DO_NOT_FIT = {
    "context=2049": "context",
    "context=16K": "context",
    "context=16K planner=static": "context",
    "cluster.nodes=4 context=64K": "context",  # train would also refuse nodes without a hostfile
    "cluster=h100x8 context=2M": "context",  # and GPUs that this machine lacks
    "cluster.device_memory=400M": "cluster.device_memory",
    "capacity=1G context=1G offload.ratio=0": "cluster.device_memory",
    "capacity=1G": "cluster.device_memory",
    "capacity=128M batch_tokens=256M": "cluster.device_memory",
    "model.layers=8 offload.ratio=1 cluster.host_memory=1M": "offload.ratio",
    "model.hidden=8192 model.ffn=28672 model.layers=400 optimizer.on_host=true": "cluster.device_memory",
    f"{' '.join(LLAMA7B_2M)} zero.stage=3 optimizer.on_host=true cluster.host_memory=1M": "cluster.host_memory",
}
FIT = (
    "context=2K",
    "context=128",  # documents longer than the context are split
    "context=1K batch_tokens=1K",  # one is longer than a step
    "batch_tokens=1M",
    "model.layers=8 offload.ratio=1",
    "cluster=h100x8",
)
# Keys, the memory of this machine in GiB, its GPUs, and the exit code.
MACHINES = (
    ("", 1, 0, 10),  # 512 MiB a rank, of which a third is for offload
    ("", 8, 0, 0),
    ("cluster=h100x8", 1, 0, 0),  # another machine: this one has no GPUs
    ("cluster=h100x8 cluster.ranks_per_node=1 context=1K offload.ratio=1 model.layers=64", 0.001, 1, 10),
    ("cluster.nodes=2", 1, 0, 0),
)


@in_turn("keys, command", [*DO_NOT_FIT], OTHERS)
def test_what_does_not_fit_has_one_answer(
    keys: str, command: str, documents: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same exit code 10, key and message in all commands, with the user's documents."""
    ((code, found, message),) = answers([*documents, *keys.split()], ["plan", command], tmp_path, capsys)
    assert (code, found) == (10, DO_NOT_FIT[keys]), message
    assert not (tmp_path / "run").exists()


@in_turn("keys, command", FIT, OTHERS[:-1])
def test_what_fits_has_one_answer(
    keys: str, command: str, documents: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answers([*documents, *keys.split()], ["plan", command], tmp_path, capsys) == {(0, "", "")}


@in_turn("asked, command", MACHINES, OTHERS[1:-1])
def test_a_machine_that_is_smaller_than_the_config_says_has_one_answer(
    asked: tuple[str, float, int, int],
    command: str,
    documents: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where ranks would run on this machine, `train` plans with its memory; what is modelled elsewhere does not."""
    keys, gib, gpus, code = asked
    monkeypatch.setattr(machine, "total_bytes", lambda: int(gib * 2**30))
    monkeypatch.setattr(machine, "least_gpu_memory", lambda: None)
    monkeypatch.setattr(check, "visible_gpus", lambda: gpus)
    ((found, key, message),) = answers([*documents, *keys.split()], ["plan", command], tmp_path, capsys)
    assert found == code, message
    if code:
        assert "of this machine's memory" in message
        assert key in ("cluster.device_memory", "offload.ratio")
    assert answers([*documents, *keys.split()], ["simulate"], tmp_path, capsys) == {(0, "", "")}


@pytest.mark.parametrize("keys", [[*LLAMA3_8B_256K, "cluster.nodes=2", "capacity=32K"], LLAMA7B_256K])
def test_the_largest_capacity_is_the_same_in_all_commands(keys: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    settings = Job(load(keys)).settings
    largest, plain = largest_capacity(settings), largest_capacity(settings.without_offload())
    assert run(["estimate-memory", *keys, "--fit", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["fit"]["capacity"], answer["fit"]["capacity_without_offload"]) == (largest, plain)
    assert answer["memory"]["tokens"] == settings.capacity < answer["fullest"]["tokens"]
    assert run(["profile-data", *keys, "--sample", "100", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["data"]
    assert data["largest_capacity"] == largest and data["fits"] and data["suggested_capacity"] <= largest


def test_headroom_is_left_free_on_the_device_and_on_the_host() -> None:
    """What fits with 0 and fills the memory does not fit with more; neither does what fills the host."""
    keys = [*LLAMA7B_2M, "offload.ratio=0"]
    config = load([*keys, "cluster.headroom=0"])
    peak = estimate(Job(config)).peak
    full = [*keys, f"cluster.device_memory={peak}"]
    assert problem(*full, "cluster.headroom=0") is None
    found = problem(*full, "cluster.headroom=0.01")
    assert found is not None and found[0] == "cluster.device_memory" and "cluster.headroom=0.01" in found[1]
    host = [*LLAMA7B_2M, "optimizer.on_host=true", "zero.stage=3"]
    states = Job(load(host)).settings.costs.host_fixed_bytes
    host.append(f"cluster.host_memory={states}")
    assert problem(*host, "cluster.headroom=0", "offload.ratio=0") is None
    found = problem(*host, "cluster.headroom=0.01", "offload.ratio=0")
    assert found is not None and found[0] == "cluster.host_memory"
