"""Two hosts with a `data.cache` each: a small run on them with texts, and chats with masks, and what it must equal."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from engine.config.load import load
from engine.errors import ExitCode
from engine.launch.run import train
from tests.data.tokenizers.chat_folder import CHATML, chat_folder
from tests.launch.hosts import Hosts, why_not
from tests.launch.small_run import ONE_THREAD, has_trained, losses, wait
from tests.trainer.worlds import in_worlds

STEPS = 14
MESH = ("parallel.tp=2", "parallel.pp=2")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two sources, texts in several blocks, and chats; a tokenizer; and what runs write."""
    root = tmp_path_factory.mktemp("run")
    (root / "texts").mkdir()
    for number in range(150):
        (root / "texts" / f"{number:03}.py").write_text(f"print({number})\n" * (1 + number % 40))
    chats = list[str]()
    for number in range(120):
        asked = {"role": "user", "content": f"Count to {number % 17}."}
        said = {"role": "assistant", "content": " ".join(map(str, range(number % 17)))}
        turns = [asked, said | {"weight": number % 3 % 2}] * (1 + number % 2)  # some answers do not count
        chats.append(json.dumps({"messages": [*turns, asked, {"role": "assistant", "content": f"No, {number}."}]}))
    (root / "chats.jsonl").write_text("\n".join(chats))
    chat_folder(root / "tokenizer", CHATML)
    return root


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Iterator[Hosts]:
    """Two hosts, which see the same files but for the folder `cache`."""
    if reason := why_not():
        pytest.skip(reason)
    hosts = Hosts(tmp_path_factory.mktemp("hosts"), 2, own=root / "cache")
    yield hosts
    hosts.close()


def settings(root: Path, out: str, cache: str, *more: str) -> list[str]:
    """The overrides of a run in the folder `out`, with a cache in the folder `cache`, both in `root`."""
    sources = [
        *(f"data.sources.texts.path={root / 'texts'}", "data.sources.texts.format=folder"),
        *(f"data.sources.chats.path={root / 'chats.jsonl'}", "data.sources.chats.format=jsonl"),
        *("data.sources.chats.field=messages", "data.mix={texts: 1, chats: 1}", f"data.cache={root / cache}"),
        *(f"data.tokenizer={root / 'tokenizer'}", "model.vocab=400"),
    ]
    sizes = ["model.layers=2", "context=128", "capacity=128", "batch_tokens=512", f"run.steps={STEPS}"]
    run = ["run.restarts=0", "run.validate_every=4", "run.checkpoint_every=100", f"run.out={root / out}"]
    return ["recipe=quickstart", *sizes, *run, *sources, *more]


def start(root: Path, hosts: Hosts, out: str, *more: str) -> subprocess.Popen[str]:
    """Start a run on both hosts, two ranks each."""
    hostfile = root / "hosts"
    hostfile.write_text("".join(f"{address} slots=2\n" for address in hosts.addresses))
    command = [*ONE_THREAD, "train", *settings(root, out, "cache", *more), "--hostfile", str(hostfile)]
    return hosts.start(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def lacks_a_file(root: Path, hosts: Hosts, elsewhere: Path, out: str, *more: str) -> str:
    """Start a run while the second host lacks a file of the texts; return the line of the error, after it has ended.

    `elsewhere` is an empty folder, which becomes that of the texts on that host.
    """
    for path in sorted((root / "texts").iterdir())[:-1]:
        (elsewhere / path.name).write_bytes(path.read_bytes())
    sshd = (hosts.folder / f"{hosts.names[1]}.pid").read_text().strip()
    inside = ["nsenter", "--target", sshd, "--mount"]
    subprocess.run([*inside, "mount", "--bind", str(elsewhere), str(root / "texts")], check=True)
    try:
        process = start(root, hosts, out, *more)
        _, said = process.communicate(timeout=400)
    finally:
        process.kill()
        subprocess.run([*inside, "umount", str(root / "texts")], check=True)
    assert process.returncode == ExitCode.DATA and "Traceback" not in said, said
    assert not has_trained(root / out, 1)
    wait(lambda: not hosts.processes(), 20)
    (line,) = (one for one in said.splitlines() if "149.py" in one)
    return line


def is_that_of_one_host(root: Path, hosts: Hosts, out: str, mesh: Sequence[str]) -> None:
    """Compare a run that has ended on both hosts with one of four ranks on one host, of the local runtime.

    Losses, validation losses and the ledger must be equal to the byte, and the blocks in both caches together those of
    the other run.
    """
    wait(lambda: not hosts.processes(), 10)
    with pytest.MonkeyPatch.context() as patch:
        in_worlds(patch, STEPS)
        alone = settings(root, f"{out}-alone", f"{out}-other", *mesh)
        train(load([*alone, "cluster.ranks_per_node=4"]), say=lambda line: None)
    there = root / f"{out}-alone"
    assert losses(root / out) == losses(there) and validated(root / out) == validated(there) != []
    assert ledger(root / out) == ledger(there) and len(ledger(there)) == 4
    assert packed(hosts.of_host(0)) | packed(hosts.of_host(1)) == packed(root / f"{out}-other")


def packed(cache: Path) -> set[str]:
    """The names of the blocks in a cache."""
    return {path.stem for path in cache.rglob("*.idx")}


def ledger(out: Path) -> dict[str, bytes]:
    """The files of the ledger of a run by name."""
    return {path.name: path.read_bytes() for path in (out / "ledger").iterdir()}


def validated(out: Path) -> list[float]:
    """The validation losses of a run."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["validation_loss"] for line in lines if "validation_loss" in line]
