"""Training through Slurm: the script, and runs on a real Slurm of two nodes where its daemons are installed."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bytescale_cli.main import run
from engine.config.load import load
from engine.errors import ConfigError, PreflightError
from engine.launch.schedulers import slurm
from engine.run.folder import RunFolder
from tests.launch.schedulers.slurm import Slurm, why_not
from tests.launch.small_run import SmallRun, has_trained, losses, wait
from tests.refusals import refused

NODES = ["cluster.nodes=2", "cluster.ranks_per_node=1"]


def script(tmp_path: Path, *overrides: str, words: tuple[str, ...] = ("train", "recipe=quickstart")) -> list[str]:
    """The lines of the script of a config."""
    return slurm.script(load(list(overrides)), RunFolder(tmp_path / "run"), words).splitlines()


def test_the_script_asks_for_what_the_config_says(tmp_path: Path) -> None:
    lines = script(
        tmp_path,
        *("recipe=llama7b-256k", "cluster.nodes=4", "slurm.partition=gpu", "slurm.account=ml", "slurm.qos=high"),
        *("slurm.time=1-12:00:00", "slurm.grace=300", "slurm.extra=['--constraint=h100','--mail-type=END']"),
    )
    assert lines[0] == "#!/bin/bash"
    asked = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")}
    assert asked == {
        *("--job-name=bytescale-llama7b-256k", "--nodes=4", "--ntasks-per-node=1", "--gres=gpu:8"),
        *("--partition=gpu", "--account=ml", "--qos=high", "--time=1-12:00:00", "--signal=USR1@300"),
        *("--open-mode=append", "--requeue", f"--output={tmp_path}/run/logs/slurm-%j.log", f"--chdir={Path.cwd()}"),
        *("--constraint=h100", "--mail-type=END", "--exclusive", "--mem=0"),
    }
    (command,) = [line for line in lines if line.startswith("srun ")]
    assert command.startswith("srun --nodes=4 --ntasks=4 --ntasks-per-node=1 ")
    assert command.endswith(f"{sys.executable} -m bytescale_cli train recipe=quickstart")


def test_a_script_of_cpus_asks_for_no_gpus_and_may_share_nodes(tmp_path: Path) -> None:
    lines = script(tmp_path, "slurm.extra=['--cpus-per-task=4']")
    assert not [line for line in lines if "gres" in line or "exclusive" in line or "mem=" in line]
    assert "#SBATCH --cpus-per-task=4" in lines


def test_words_and_paths_reach_the_job_as_they_are(tmp_path: Path) -> None:
    """bash reads the script; sbatch replaces %j and what else begins with a percent sign in the name of the log."""
    words = ("train", "data.path=a b", "run.out=$HOME;ls", "it's")
    folder = RunFolder(tmp_path / "50% off")
    text = slurm.script(load([]), folder, words)
    assert f'#SBATCH --output="{tmp_path}/50%% off/logs/slurm-%j.log"' in text.splitlines()
    stub = tmp_path / "srun"
    stub.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > {tmp_path}/said\nexit 2\n')
    stub.chmod(0o755)
    (tmp_path / "scontrol").symlink_to("/bin/true")
    (tmp_path / "script").write_text(text)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", str(tmp_path / "script")], env=environment, check=False)
    assert done.returncode == 2
    assert (tmp_path / "said").read_text().splitlines()[-4:] == list(words)


@pytest.mark.parametrize(
    ("code", "state", "requeued"),
    [(75, "RUNNING", True), (75, "CANCELLED", False), *((code, "RUNNING", False) for code in (0, 2, 93, 124, 130))],
)
def test_only_a_preempted_run_is_requeued(tmp_path: Path, code: int, state: str, requeued: bool) -> None:
    """Not one that makes no progress, that has a mistake, or that somebody has cancelled."""
    for name, body in (
        ("srun", f"exit {code}"),
        ("scontrol", f'echo "$@" >> {tmp_path}/said; echo JobId=7 JobState={state} Reason=None'),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "script").write_text("\n".join(script(tmp_path)))
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", str(tmp_path / "script")], env=environment, check=False)
    assert done.returncode == code
    assert ("requeue 7" in (tmp_path / "said").read_text().splitlines()) == requeued


@pytest.mark.parametrize("option", ["exclusive", "--comment=a\nrm -r /", "", "=x"])
def test_options_that_sbatch_would_not_read_as_one_are_refused(tmp_path: Path, option: str) -> None:
    config = load([])
    config = config.model_copy(update={"slurm": config.slurm.model_copy(update={"extra": (option,)})})
    with refused(ConfigError) as problems:
        slurm.script(config, RunFolder(tmp_path / "run"), ["train"])
    hint = str(problems[0].hint)
    assert hint.startswith("for example ")
    assert load(shlex.split(hint.removeprefix("for example "))).slurm.extra == ("--mem=0",)


@pytest.mark.parametrize("override", ["slurm.partition='a b'", "slurm.time=soon", "slurm.grace=0"])
def test_values_that_slurm_cannot_take_are_refused(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load([override])
    assert str(caught.value.problems[0].key).startswith(override.split("=")[0])


def test_a_dry_run_prints_the_script_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--launcher", "slurm", "--out", str(tmp_path / "run"), "--dry-run", *NODES]
    assert run(words) == 0
    text = capsys.readouterr().out
    assert text.startswith("#!/bin/bash\n") and "train cluster.nodes=2 cluster.ranks_per_node=1 run.out=" in text
    assert run([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dry_run"]["script"] + "\n" == text + "\n"
    assert not (tmp_path / "run").exists()


def test_without_slurm_the_machine_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for attempt in (lambda: slurm.submit("", tmp_path), lambda: slurm.run_srun(["srun"])):
        with refused(PreflightError) as problems:
            attempt()
        assert "sbatch" in problems[0].message or "srun" in problems[0].message


@pytest.mark.parametrize(("nohup", "code"), [(False, 75), (True, 0)])
def test_a_hang_up_asks_srun_to_stop_unless_nohup_ignores_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nohup: bool, code: int
) -> None:
    stub = tmp_path / "srun"
    stub.write_text("#!/bin/sh\ntrap 'exit 75' USR1\nsleep 1\nkill -HUP $PPID\nsleep 1 & wait\nexit 0\n")
    stub.chmod(0o755)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else lambda *_: None)
    try:
        assert slurm.run_srun([str(stub)]) == code
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            "sbatch: error: DNS lookup failed\nsbatch: error: failed to fetch config\nsbatch: fatal: No controller\n",
            "No controller",
        ),
        ("sbatch: error: Invalid --mem\nTry 'sbatch --help' for more information\n", "Invalid --mem"),
        ("", "exit code 1"),
    ],
)
def test_what_sbatch_says_last_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, message: str
) -> None:
    (tmp_path / "said").write_text(said)
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\ncat {tmp_path}/said >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with refused(PreflightError) as problems:
        slurm.submit("", tmp_path / "slurm.sh")
    assert problems[0].message == message and f"`sbatch {tmp_path}/slurm.sh`" in str(problems[0].hint)


def test_what_is_submitted_is_the_script_that_was_made_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user of the run folder may have replaced the file meanwhile."""
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\n[ $# = 1 ] && cat > {tmp_path}/got && echo '7;cluster'\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "slurm.sh").write_text("#!/bin/sh\nrm -r everything\n")
    assert slurm.submit("#!/bin/bash\necho ü\n", tmp_path / "slurm.sh") == "7"
    assert (tmp_path / "got").read_text() == "#!/bin/bash\necho ü\n"


def test_an_allocation_is_recognised() -> None:
    assert slurm.allocated_nodes({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}) == 3
    assert slurm.allocated_nodes({"SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}) == 2
    assert slurm.allocated_nodes({}) is None


def test_a_dry_run_has_the_nodes_of_the_allocation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert run(["train", "--launcher", "slurm", "--dry-run", "--json"]) == 0
    (command,) = json.loads(capsys.readouterr().out)["dry_run"]["commands"]
    assert command.startswith("srun --nodes=2 --ntasks=2 --overlap ")


# A real Slurm.


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if reason := why_not():
        pytest.skip(reason)
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.close()


STEPS = 24


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    return SmallRun(tmp_path_factory.mktemp("data"), STEPS)


def begun(cluster: Slurm, out: Path, small: SmallRun) -> tuple[str, Path]:
    """Submit a run and wait for some steps; return the number of its job and the log."""
    command = small.command(out, "--launcher", "slurm", "--json", *NODES)
    process = cluster.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    told, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "tail -F" in said and "squeue -j" in said
    answer = json.loads(told)["slurm"]
    job, log = answer["job"], Path(answer["log"])

    def state() -> object:
        return cluster.state(job), log.exists() and log.read_text(), cluster.logs()

    wait(lambda: has_trained(out, 5), 180, state)
    return job, log


@pytest.mark.world
def test_a_job_whose_node_fails_is_requeued_and_resumes_exactly(
    cluster: Slurm, tmp_path: Path, small: SmallRun
) -> None:
    out = tmp_path / "run"
    job, log = begun(cluster, out, small)
    cluster.down("n2")
    wait(lambda: "was lost: its connection has ended" in log.read_text(), 60, log.read_text)
    expected = small.expected()  # meanwhile Slurm notices it too
    wait(lambda: cluster.state(job).get("JobState") == "PENDING", 90, lambda: (cluster.state(job), cluster.logs()))
    cluster.up("n2")
    found = cluster.wait_for(job, "COMPLETED", "FAILED", "CANCELLED")
    assert (found["JobState"], found["Restarts"]) == ("COMPLETED", "1"), log.read_text()
    assert losses(out) == expected


@pytest.mark.world
def test_a_job_that_is_preempted_is_requeued_and_resumes_exactly(
    cluster: Slurm, tmp_path: Path, small: SmallRun
) -> None:
    """The signal is the one that `--signal` sends before the time is over."""
    out = tmp_path / "run"
    job, log = begun(cluster, out, small)
    assert {one.environ()["SLURMD_NODENAME"] for one in cluster.processes() if "engine.trainer" in one.cmdline()} == {
        *("n1", "n2")
    }
    cluster.run("scancel", "--signal=USR1", job)
    wait(lambda: cluster.state(job).get("Restarts") == "1", 90, lambda: (cluster.state(job), log.read_text()))
    found = cluster.wait_for(job, "COMPLETED", "FAILED", "CANCELLED")
    assert (found["JobState"], found["ExitCode"]) == ("COMPLETED", "0:0"), log.read_text()
    said = log.read_text()
    assert "stopping after this step" in said and "resuming from" in said, said
    assert losses(out) == small.expected()
    assert not list((out / "logs").glob("launch-*")) and not cluster.processes()


@pytest.mark.world
def test_training_inside_an_allocation(cluster: Slurm, tmp_path: Path, small: SmallRun) -> None:
    """Only the first process prints; the exit code is that of the run."""
    out = tmp_path / "run"
    words = small.command(out, "--launcher", "slurm", "cluster.ranks_per_node=1", "--json")
    command = ["salloc", "-N2", "--ntasks-per-node=1", *words]
    process = cluster.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait(lambda: has_trained(out, 5) or process.poll() is not None, 180)
    first = [one for one in cluster.processes() if "--launcher" in one.cmdline()]
    assert first, process.communicate(timeout=60)
    first[0].send_signal(signal.SIGTERM)  # the command that the user has started passes it on
    told, said = process.communicate(timeout=120)
    assert process.returncode == 75, said
    assert json.loads(told)["error"]["code"] == 75
    process = cluster.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    told, said = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert json.loads(told)["train"]["steps"] == STEPS
    assert losses(out) == small.expected()
