"""How long the training loop waits for a disk on which each fsync takes long, as on file systems of a network.

    python benchmarks/slow_disk.py [--fsync-ms 20] [--steps 40] [--code FOLDER]

Trains the quickstart recipe on CPU ranks. Each fsync of Python first sleeps. The time is summed that the main thread of
rank 0 spends in fsync and in waiting for the thread that calls it. `--code` is the folder of the code to measure, such
as that of an older version.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

# Python imports it at its start, in every process.
_SLOW = """
import concurrent.futures, os, threading, time

def timed(call, before=0.0):
    def wrapped(*given, **named):
        began = time.perf_counter()
        time.sleep(before)
        found = call(*given, **named)
        if os.environ.get("RANK") == "0" and threading.current_thread() is threading.main_thread():
            with open(os.environ["SLOW_DISK"], "a") as file:
                print(time.perf_counter() - began, file=file)
        return found
    return wrapped

def submit(self, *given, before=concurrent.futures.ThreadPoolExecutor.submit):
    future = before(self, *given)
    if self._thread_name_prefix == "journal":
        future.result = timed(future.result)
    return future

os.fsync = timed(os.fsync, {seconds})
concurrent.futures.ThreadPoolExecutor.submit = submit
"""


def measure(code: Path, seconds: float, steps: int) -> dict[str, float]:
    """Train, and return the waits of a step in seconds, and the time of all steps."""
    with tempfile.TemporaryDirectory() as root:
        Path(root, "sitecustomize.py").write_text(_SLOW.format(seconds=seconds))
        environment = os.environ | {"PYTHONPATH": f"{root}:{code.resolve()}", "SLOW_DISK": f"{root}/waits"}
        run = ["train", "recipe=quickstart", f"run.steps={steps}", "run.checkpoint_every=100000"]
        more = ["data.validation_tokens=0", "--out", f"{root}/run"]
        program = [sys.executable, "-m", "bytescale_cli", *run, *more]
        subprocess.run(program, check=True, env=environment, capture_output=True, cwd=root)
        waits = [float(line) for line in Path(root, "waits").read_text().splitlines()]
        lines = [json.loads(line) for line in Path(root, "run", "metrics.jsonl").read_text().splitlines()]
    return {"wait_ms": 1e3 * sum(waits) / steps, "step_ms": 1e3 * statistics.median(line["step_s"] for line in lines)}


def main() -> None:
    """Measure with and without the sleeps, and print both as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fsync-ms", type=float, default=20)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--code", type=Path, default=Path(__file__).parents[1])
    arguments = parser.parse_args()
    for fsync_ms in (0, arguments.fsync_ms):
        found = measure(arguments.code, fsync_ms / 1e3, arguments.steps)
        print(json.dumps({"fsync_ms": fsync_ms} | found))


if __name__ == "__main__":
    main()
