"""What ranks on other hosts get from the environment. If it fails, they use another network, or a secret is shown."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bytescale_cli.main import run
from engine.cluster.cluster import Cluster
from engine.cluster.hostfile import Node
from engine.config.load import load
from engine.config.schema import Config
from engine.errors import PreflightError
from engine.hardware.profile import check_cluster
from engine.job import Job
from engine.launch.agents.commands import node_commands
from engine.launch.agents.environment import environment_problem, forwarded
from engine.launch.agents.ranks import run_ranks
from engine.launch.run import train
from engine.run.folder import RunFolder
from engine.run.metrics import read_metrics
from tests.refusals import refused
from tests.root import ROOT

USERS = {
    "NCCL_SOCKET_IFNAME": "=lo,eth 1",
    "NCCL_DEBUG": "it's $INFO\nand more",
    "GLOO_SOCKET_IFNAME": "lo,lo",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2468",
    "CUDA_HOME": "/opt/cuda",
    "UCX_TLS": "rc_mlx5",
    "TRITON_CACHE_DIR": "/tmp/triton",
    "HF_HOME": "/data/hf",
    "LD_LIBRARY_PATH": "/opt/lib:/opt/lib64",
    "PYTHONPATH": f"/opt/python:{ROOT}",
}
SECRETS = {"HF_TOKEN": "hf_abc", "NCCL_API_KEY": "my-key", "HF_PASSWORD": "my-word", "TORCH_SECRET_OF": "my-secret"}
SECRETS |= {"HF_HUB_BEARER": "b-value", "DS_ACCESS_PAT": "p-value"}
BY_VALUE = {
    "HF_ENDPOINT": "https://user:my-password@mirror/hf",
    "TORCHINDUCTOR_REDIS_URL": "redis://:my-password@host:6379/0",
    "NCCL_DEBUG_FILE": "ghp_0123456789abcdefghij",
    "TRITON_REMOTE": "Bearer abcdefgh12345",
    "DS_CODE": "0123456789abcdef0123456789ABCDEF",
}
LEFT = {"HF_HUB_ENABLE_HF_TRANSFER": "1", "DS_SOMETHING": "x", "TRANSFORMERS_OFFLINE": "1"}
OTHERS = Cluster((Node("alpha", 1), Node("beta", 1)), 2**30)
STAY = {"CUDA_VISIBLE_DEVICES": "3", "NCCL_HOSTID": "here", "PATH": "/bin", "HOME": "/root", "AWS_ACCESS_KEY_ID": "a"}


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a stand-in for ssh first on PATH: it runs the command with no variable of this environment, as sshd does."""
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/sh\nfor command; do :; done\nexec env -i HOME="$HOME" PATH=/usr/bin:/bin sh -c "$command"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


def ranks_of(gpus: bool, stage: int, pp: int = 1) -> Config:
    return load([f"cluster={'h100x8' if gpus else 'local'}", f"zero.stage={stage}", f"parallel.pp={pp}"])


def seen_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: bool, stage: int) -> dict[str, str]:
    """Start the rank of another host, which prints its environment to its log."""
    folder = RunFolder(tmp_path / "run")
    folder.logs.mkdir(parents=True, exist_ok=True)
    folder.log(1).unlink(missing_ok=True)
    alpha, beta = node_commands(Job(ranks_of(gpus, stage), OTHERS.nodes), folder, None)
    shown = str(alpha) + str(beta)
    assert not any(value in shown for value in (*USERS.values(), *SECRETS.values())), "a dry run prints it"
    for value in (*USERS.values(), *SECRETS.values()):
        needed = value in (USERS["LD_LIBRARY_PATH"], USERS["PYTHONPATH"])
        assert needed == (value in " ".join(beta.arguments)), "`ps` shows it"
    shows = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
    beta = replace(beta, work=replace(beta.work, ranks=[(1, shows)], peer=None, gpus=False))  # this host has none
    run_ranks([beta], folder, lambda: None, lambda line: None)
    seen: dict[str, str] = json.loads(folder.log(1).read_text())
    return seen


@pytest.mark.long
@pytest.mark.usefixtures("ssh")
def test_a_remote_rank_gets_what_libraries_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("NCCL_", "HF_", "CUDA_", "PYTORCH_")):
            monkeypatch.delenv(name)
    for name, value in {**USERS, **SECRETS, "CUDA_VISIBLE_DEVICES": "3", "NCCL_HOSTID": "here"}.items():
        monkeypatch.setenv(name, value)
    seen = seen_there(tmp_path, monkeypatch, gpus=True, stage=3)
    assert {name: seen.get(name) for name in USERS} == USERS
    assert not {*SECRETS, "CUDA_VISIBLE_DEVICES", "NCCL_HOSTID"} & set(seen)
    assert (seen["RANK"], seen["LOCAL_RANK"], seen["NCCL_LAUNCH_ORDER_IMPLICIT"]) == ("1", "0", "1")
    assert seen["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert seen_there(tmp_path, monkeypatch, gpus=False, stage=3)["CUDA_VISIBLE_DEVICES"] == ""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native")
    assert seen_there(tmp_path, monkeypatch, gpus=True, stage=3)["PYTORCH_CUDA_ALLOC_CONF"] == "backend:native"


def test_what_is_forwarded_withheld_and_left_here() -> None:
    chosen = forwarded({**STAY, **SECRETS, **BY_VALUE, **LEFT, **USERS}, OTHERS)
    assert chosen.variables == USERS and list(chosen.variables) == sorted(USERS)
    assert chosen.withheld == sorted({**SECRETS, **BY_VALUE}) and chosen.left == sorted(LEFT)
    assert forwarded(STAY, OTHERS) == ({}, [], [])


def test_users_may_name_more(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"BYTESCALE_FORWARD": "HF_TOKEN, MY_SETTING,NOT_SET", "MY_SETTING": "1", **SECRETS}
    chosen = forwarded(asked, OTHERS)
    assert chosen.variables == {"HF_TOKEN": SECRETS["HF_TOKEN"], "MY_SETTING": "1"}
    assert chosen.withheld == sorted(SECRETS.keys() - {"HF_TOKEN"})


def test_a_network_partition_is_no_secret() -> None:
    """With another one, a host would wait for the others for ever."""
    assert forwarded({"NCCL_IB_PKEY": "3", "UCX_IB_PKEY": "3"}, OTHERS).withheld == []
    assert forwarded({"HF_APIKEY": "a", "HF_ACCESS_TOKENS": "b"}, OTHERS).variables == {}


def test_launch_order_is_kept_only_where_two_communicators_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)

    def order(ranks: int, gpus: bool, stage: int, pp: int = 1) -> str | None:
        nodes = (Node("localhost", ranks),)
        commands = node_commands(Job(ranks_of(gpus, stage, pp), nodes), RunFolder(tmp_path), None)
        return commands[0].work.environment.get("NCCL_LAUNCH_ORDER_IMPLICIT")

    assert order(2, True, 3) == order(2, True, 2) == order(2, True, 1, pp=2) == "1"
    assert [order(2, True, 1), order(2, False, 3), order(1, True, 3)] == [None] * 3
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "0")
    assert order(2, True, 3) == "0", "users may know better"


def test_nccl_lets_ranks_share_a_gpu_in_the_test_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)

    def shares(gpus: bool) -> str | None:
        commands = node_commands(Job(ranks_of(gpus, 1), (Node("localhost", 2),)), RunFolder(tmp_path), None)
        return commands[0].work.environment.get("NCCL_MULTI_RANK_GPU_ENABLE")

    assert shares(True) is None
    monkeypatch.setenv("BYTESCALE_ONE_GPU", "1")
    assert shares(True) == "1" and shares(False) is None


def recipe(tmp_path: Path, *overrides: str) -> list[str]:
    (tmp_path / "data").mkdir(exist_ok=True)
    (tmp_path / "data" / "a.py").write_text("print()\n" * 400)
    return [*overrides, f"data.path={tmp_path / 'data'}", f"run.out={tmp_path / 'run'}"]


def test_one_queue_for_all_streams_is_refused_on_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    (tmp_path / "hosts").write_text("alpha slots=2\n")
    h200 = load(recipe(tmp_path, "recipe=h200-1b-8k", f"cluster.hostfile={tmp_path / 'hosts'}"))
    with refused(PreflightError, "CUDA_DEVICE_MAX_CONNECTIONS=1") as problems:
        train(h200)
    assert not (tmp_path / "run").exists()
    listed = train(h200, dry_run=True, say=lambda line: None)["dry_run"]["refused"]
    assert [one["key"] for one in listed] == [problems[0].key]
    with pytest.raises(PreflightError):
        check_cluster(Job(h200), gpus=1)
    assert environment_problem(load([]), os.environ) is None, "CPUs have no streams"
    assert environment_problem(h200, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}) is None
    assert environment_problem(h200, {}) is None


def test_a_dry_run_names_what_is_forwarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "private-net")
    for name in list(os.environ):
        if name.startswith(("HF_", "DS_", "TRANSFORMERS_", "TOKENIZERS_", "HUGGING")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_TOKEN", "hf_abc")
    monkeypatch.setenv("HF_ENDPOINT", "https://user:my-password@mirror/hf")
    monkeypatch.setenv("DS_SOMETHING", "some-value")
    (tmp_path / "hosts").write_text("alpha slots=2\n")
    words = recipe(tmp_path, "train", "recipe=h200-1b-8k", "--dry-run", "--hostfile", str(tmp_path / "hosts"))
    assert run(words) == 0
    text = capsys.readouterr().out
    assert run([*words, "--json"]) == 0
    shown = capsys.readouterr().out
    dry = json.loads(shown)["dry_run"]
    assert "NCCL_SOCKET_IFNAME" in dry["forwarded"] and dry["withheld"] == ["HF_ENDPOINT", "HF_TOKEN"]
    assert dry["not_forwarded"] == ["DS_SOMETHING"] and "DS_SOMETHING" in text and "BYTESCALE_FORWARD" in text
    assert "my-password" not in text + shown and "some-value" not in text + shown
    assert "other hosts also get from this environment: " in text and "look like secrets: HF_ENDPOINT, HF_TOKEN" in text
    assert "private-net" not in text + shown and "hf_abc" not in text + shown
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    assert run([*words, "--json"]) == 0
    dry = json.loads(capsys.readouterr().out)["dry_run"]
    assert (dry["forwarded"], dry["withheld"]) == ([], []), "ranks here inherit everything"


@pytest.mark.world
@pytest.mark.usefixtures("ssh")
def test_a_run_on_another_host(tmp_path: Path) -> None:
    """Two ranks train a step behind ssh. 127.0.0.2 is this machine too, but the launcher does not know that."""
    (tmp_path / "hosts").write_text("127.0.0.2 slots=2\n")
    small = ["recipe=quickstart", "model.layers=1", "context=256", "capacity=128", "batch_tokens=512", "run.steps=1"]
    words = recipe(tmp_path, *small, f"cluster.hostfile={tmp_path / 'hosts'}", "data.validation_share=0")
    train(load(words), say=lambda line: None)
    (line,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert line["step"] == 1
