"""Loaders that are killed or stopped while a run trains: its losses and its ledger are those of an undisturbed run.

    python benchmarks/loader_faults.py [--faults 20] [--steps 40]

Two ranks train on JSONL that a loader tokenizes meanwhile. A row is a run: which signal its loaders got, how many of
them while they packed a block, steps whose loss differs from that of the first run, documents that the ledger has too
few or twice, and what share of all steps ranks waited for tokens and for plans, which wait for lengths.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import psutil
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).parent.parent))

from engine.data.ledger import Ledger

SIZES = ["model.layers=1", "model.hidden=32", "model.ffn=32", "model.vocab=1000", "context=2K", "capacity=2K"]
RARELY = ["run.validate_every=1000", "run.checkpoint_every=1000", "data.validation_tokens=16K"]
PROGRAM = [sys.executable, "-m", "bytescale_cli", "train", "recipe=quickstart", "data=jsonl"]


def main() -> None:
    """Print a row for a run without signals, one with SIGKILL, and one with SIGSTOP."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    titles = "signal | loaders hit | of them packing | losses that differ | lost | twice"
    print(f"| {titles} | waits for tokens, % | for plans, % |\n|{'---|' * 8}")
    with tempfile.TemporaryDirectory() as folder:
        words = corpus(Path(folder))
        first: list[float] = []
        documents: list[tuple[int, ...]] = []
        for how in (0, signal.SIGKILL, signal.SIGSTOP):
            name = signal.Signals(how).name if how else "none"
            out = Path(folder, name)
            settings = [*words, f"run.out={out}", f"data.cache={out}-cache", f"run.steps={arguments.steps}"]
            hits, packing = run(settings, how, arguments.faults)
            lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
            losses, rows = [line["loss"] for line in lines], ledger(out, arguments.steps)
            first, documents = first or losses, documents or rows
            total = sum(line["step_s"] for line in lines)
            tokens, plans = (100 * sum(line[key] for line in lines) / total for key in ("data_wait_s", "plan_wait_s"))
            different = sum(one != other for one, other in zip(first, losses, strict=True))
            lost, twice = len({*documents} - {*rows}), len(rows) - len({*rows})
            row = [name, hits, packing, different, lost, twice, f"{tokens:.2f}", f"{plans:.2f}"]
            print(f"| {' | '.join(map(str, row))} |", flush=True)


def corpus(folder: Path) -> list[str]:
    """Write the standard library twelve times as JSONL, and a tokenizer. Returns the settings of a run."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in sorted(root.rglob("*.py")) if "-packages" not in str(path)][:1500]
    texts = [path.read_text("utf-8", "replace") for path in paths]
    with Path(folder, "texts.jsonl").open("w") as file:
        for copy in range(12):
            file.writelines(json.dumps({"text": f"# copy {copy}\n{text}"}) + "\n" for text in texts)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1000, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts[:100], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(ends))
    names = [f"data.path={folder}/texts.jsonl", f"data.tokenizer={folder}/tokenizer.json"]
    return [*names, *SIZES, *RARELY, "data.loaders=1", "batch_tokens=128K"]


def run(words: list[str], how: int, faults: int) -> tuple[int, int]:
    """Train; send signal `how`, if not 0, to loaders at random moments. Returns how many got it, and were packing."""
    train = psutil.Popen([*PROGRAM, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    drawn, hits, packing = random.Random(1), 0, 0
    while train.poll() is None:
        time.sleep(drawn.uniform(0.1, 0.9))
        for loader in loaders(train)[:1] if how and hits < faults else []:
            try:
                busy = loader.status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
                os.kill(loader.pid, how)
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
            hits, packing = hits + 1, packing + busy
    if train.returncode:
        sys.exit(f"failed: bytescale train {' '.join(words)}")
    return hits, packing


def loaders(train: psutil.Process) -> list[psutil.Process]:
    """Return the loaders of a run: the children of its fork servers."""
    found = list[psutil.Process]()
    for process in train.children(recursive=True):
        try:
            if "forkserver" in " ".join(process.cmdline()) and "forkserver" in " ".join(process.parent().cmdline()):
                found.append(process)
        except (psutil.NoSuchProcess, AttributeError):
            pass
    return found


def ledger(out: Path, steps: int) -> list[tuple[int, ...]]:
    """Return the first input of each sequence of a run, as (source, block, document, input)."""
    found = Ledger(out / "ledger")
    columns = ["source", "block", "document", "start"]
    return [tuple(row) for step in range(1, steps + 1) for row in found.documents(step)[columns].tolist()]


if __name__ == "__main__":
    main()
