"""What torch finds, with stand-ins for its answers: machines with GPUs look different from this one."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config.load import load
from engine.config.schema import Config
from engine.doctor import devices, libraries
from engine.doctor.libraries import Libraries
from engine.job import Job
from engine.launch.checks import launchable

CPUS = load([])
GPUS = load(["cluster=h100x8", "cluster.ranks_per_node=2"])
ZERO3 = load(["cluster=h100x8", "cluster.ranks_per_node=2", "zero.stage=3", "dtype=bf16"])
STAGES = load(["cluster=h100x8", "cluster.ranks_per_node=2", "parallel.pp=2", "context=8K"])
H100 = {"names": ["NVIDIA H100", "NVIDIA H100"], "why": None}


def answers(**more: dict[str, Any]) -> Libraries:
    torch = {"version": "2.13.0+cu128", "cuda": "12.8"}
    return Libraries({"torch": torch, "gpus": H100, "nccl": {"version": [2, 27, 5]}, **more}, "killed by SIGILL")


@pytest.fixture
def with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (devices, launchable):
        monkeypatch.setattr(module, "visible_gpus", lambda: 2)
    monkeypatch.setattr(launchable, "pytorch_without_cuda", lambda: None)
    monkeypatch.setattr(launchable, "least_gpu_memory", lambda: None)


def gpus(config: Config, found: Libraries) -> Any:
    return devices.gpus(Job(config), found)


def test_a_torch_that_cannot_be_imported_fails_once() -> None:
    """Everything that asks torch is skipped then."""
    broken = Libraries({"torch": {"error": "OSError: libcudart.so"}}, "killed by SIGILL")
    assert devices.torch(broken).state == "failed" and "libcudart.so" in devices.torch(broken).message
    assert devices.deepspeed(broken).state == "skipped"
    assert devices.kernel(broken).state == "skipped"
    assert devices.torch(Libraries({}, "killed by SIGILL")).message == "cannot be imported: killed by SIGILL"


def test_deepspeed_may_be_broken_alone() -> None:
    """A process that dies while it imports DeepSpeed has answered the questions before."""
    found = devices.deepspeed(answers())
    assert found.state == "failed" and "killed by SIGILL" in found.message


def test_builds_are_named() -> None:
    assert devices.torch(answers()).value == "2.13.0+cu128, built for CUDA 12.8"


def test_gpus_of_a_machine(with_gpus: None) -> None:
    found = gpus(GPUS, answers())
    assert (found.state, found.message) == ("ok", "2 x NVIDIA H100")
    assert gpus(CPUS, answers()).message == "2 x NVIDIA H100; cluster=local trains on CPUs"


def test_fewer_gpus_than_ranks_fail(with_gpus: None) -> None:
    found = gpus(load(["cluster=h100x8"]), answers())
    assert found.state == "failed" and "8 ranks need one GPU each, but CUDA finds 2" in found.message
    assert "cluster.ranks_per_node=2" in found.hint


def test_gpus_that_torch_cannot_use(with_gpus: None) -> None:
    """They fail a config for GPUs, and are a warning to one for CPUs."""
    why = {"names": [], "why": "The NVIDIA driver on your system is too old"}
    found = gpus(GPUS, answers(gpus=why))
    assert found.state == "failed" and "too old" in found.message
    assert gpus(CPUS, answers(gpus=why)).state == "warning"


def test_nccl_must_keep_the_order_of_kernels_for_zero_3_and_pipelines(with_gpus: None) -> None:
    old = answers(nccl={"version": [2, 21, 5]})
    for config, found, state in (
        (ZERO3, old, "failed"),
        (STAGES, old, "failed"),
        (GPUS, old, "ok"),
        (ZERO3, answers(), "ok"),
        (GPUS, answers(nccl={"version": None}), "failed"),
    ):
        assert devices.nccl(Job(config), found).state == state


def test_one_queue_for_all_streams_fails_only_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert devices.environment(GPUS).state == "failed" and devices.environment(CPUS).state == "ok"


@pytest.mark.parametrize(
    ("name", "rejected", "state", "said"),
    [
        ("cudnn", ["fused_cpu: runs on CPUs only", "flash_attn_3: not installed"], "ok", "flash_attn_3: not installed"),
        ("torch_varlen", ["cudnn: installed but broken: dq"], "warning", "installed but broken"),
        ("reference", ["cudnn: does not support a head size of 12"], "warning", "slow"),
    ],
)
def test_the_attention_kernel_and_why_not_a_better_one(name: str, rejected: list[str], state: str, said: str) -> None:
    kernel = {"name": name, "reason": "title", "rejected": rejected, "dtype": "bf16"}
    found = devices.kernel(answers(kernel=kernel))
    assert (found.state, found.value) == (state, name)
    assert said in found.message and "CPUs only" not in found.message


@pytest.mark.long
def test_real_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, with the real torch and DeepSpeed. On a busy machine their import may take minutes."""
    monkeypatch.setattr(libraries, "_TIMEOUT_S", 500.0)
    found = libraries.ask(CPUS)
    assert {name: found[name]["error"] for name in libraries._QUESTIONS if "error" in found[name]} == {}
    assert found["kernel"]["name"] == "fused_cpu"
    assert devices.torch(found).state == devices.deepspeed(found).state == "ok"


def test_a_process_that_is_killed_tells_by_which_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "sys", type("sys", (), {"executable": "/bin/false"}))
    assert libraries.ask(CPUS)["torch"] == {"error": "no reason given"}
