"""Our own commands on a GPU, as a user runs them, with their results as JSON.

`python benchmarks/gpu/commands.py --only tests|training|profile [--json FILE]`:

    tests     `pytest -m gpu`: how many tests passed, and which failed
    training  `bytescale train recipe=h200-1b-8k` for 15 steps of 64K tokens, then resumed for 5 more: the time of each
              step
    profile   `bytescale profile-hardware`, beside the values of the data sheet

The results are written after each command. Exit codes: 1 if a command fails, 4 if a test or the resumed run is wrong, 3
without a CUDA device.

The tests run without pyproject.toml's settings of pytest and without tests/conftest.py. So they need pytest 7 or later,
but neither pytest 9 nor pytest-timeout nor hypothesis, and warnings are no failures.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu import on_gpu
from benchmarks.gpu.on_gpu import Row
from engine.cost.datasheets import nominal
from engine.run.metrics import read_metrics

ROOT = Path(__file__).parents[2]
RECIPE, CLUSTER = "recipe=h200-1b-8k", "h200x8"
STEPS, MORE_STEPS = 15, 5
# A step of the recipe's 512K tokens would take 8 s by the data sheet.
LESS = ("batch_tokens=64K", "run.validate_every=1000")
# pytest with settings of its own, from /dev/null instead of pyproject.toml.
PYTEST = (
    *("pytest", "-v", "-c", os.devnull, f"--rootdir={ROOT}", "-o", f"pythonpath={ROOT}", "--noconftest"),
    *("--import-mode=importlib", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestUnknownMarkWarning"),
    *("-o", "faulthandler_timeout=60"),  # the log then shows where a test hangs
)
KEYS = ("step", "loss", "step_s", "tokens_per_s", "plan_wait_s", "data_wait_s", "grad_norm")


def main() -> None:
    """Run the selected commands, and print their results."""
    options = on_gpu.parse_options(__doc__, tuple(SECTIONS))
    rows: list[Row] = []
    for section in [options.only] if options.only else SECTIONS:
        # Ranks that were killed may still write for a moment.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            for row in results(section, Path(folder), options.dry_run):
                rows.append(row)
                on_gpu.write(options.json, on_gpu.device_of(options), rows=rows)
    on_gpu.leave(rows)


def results(section: str, folder: Path, dry_run: bool) -> Iterator[Row]:
    """Yield and print the rows of a section as they come. The last one has the error if it fails."""
    try:
        for found in SECTIONS[section](folder, dry_run):
            row = {"section": section} | found
            print(json.dumps(row, indent=1), flush=True)
            yield row
    except Exception as error:
        yield on_gpu.failed({"section": section}, error)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m ARGUMENTS` in the repository. What it says goes to this program's standard error."""
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def bytescale(*arguments: str) -> Row:
    """Run a command of ours with `--json`; return its result. Raises RuntimeError with its message if it fails."""
    answer = json.loads(run("bytescale_cli", *arguments, "--json").stdout)
    if not answer["ok"]:
        raise RuntimeError(f"{answer['error']['key']}: {answer['error']['message']}")
    return dict(answer)


def tests(folder: Path, dry_run: bool) -> Iterator[Row]:
    """Run the tests that need a GPU. A dry run selects a few that need none."""
    report = folder / "tests.xml"
    chosen = ["-m", "not gpu", "tests/offload/test_pinned.py"] if dry_run else ["-m", "gpu", *files_with_gpu_tests()]
    done = run(*PYTEST, "-x" if dry_run else "--maxfail=20", f"--junitxml={report}", *chosen)
    print(done.stdout, flush=True)
    if not report.exists():
        raise RuntimeError(f"pytest exited with code {done.returncode}: {done.stdout.strip().splitlines()[-1:]}")
    yield outcomes(ElementTree.parse(report).getroot())


def files_with_gpu_tests() -> list[str]:
    """The test files that have tests marked gpu: collecting only these is faster, and needs fewer packages."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if "pytest.mark.gpu" in path.read_text(encoding="utf-8")]


def outcomes(report: ElementTree.Element) -> Row:
    """Count the tests of a JUnit report, and name those that failed with the first line of the reason."""
    cases = list(report.iter("testcase"))
    failed = {}
    for case in cases:
        faults = [fault for kind in ("failure", "error") for fault in case.iter(kind)]
        if faults:
            first = (faults[0].get("message") or "").splitlines()[:1]
            failed[f"{case.get('classname')}::{case.get('name')}"] = "".join(first)
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "passed": len(cases) - len(failed) - skipped,
        "skipped": skipped,
        "failed": failed,
        "slowest_s": max((float(case.get("time") or 0) for case in cases), default=0.0),
        "holds": bool(cases) and not failed,
    }


def training(folder: Path, dry_run: bool) -> Iterator[Row]:
    """Train for a few steps, then resume from the last checkpoint for more, in another run folder. A row for each."""
    recipe = ["recipe=quickstart"] if dry_run else [RECIPE, *LESS]
    steps, more = (2, 1) if dry_run else (STEPS, MORE_STEPS)
    checkpoint = folder / "first" / "checkpoints" / f"step-{steps:08d}"
    last = steps + more
    runs = {"first": (range(1, steps + 1), ()), "resumed": (range(steps + 1, last + 1), ("--resume", str(checkpoint)))}
    for name, (numbers, options) in runs.items():
        out = folder / name
        lengths = [f"run.steps={numbers[-1]}", f"run.checkpoint_every={steps}"]
        bytescale("train", *recipe, *lengths, f"run.out={out}", *options)
        lines = [{key: line.get(key) for key in KEYS} for line in read_metrics(out / "metrics.jsonl")]
        yield {"run": name, "steps": lines, "holds": [line["step"] for line in lines] == list(numbers)}


def profile(folder: Path, dry_run: bool) -> Iterator[Row]:
    """Measure this machine; yields the calibration beside the nominal one."""
    if dry_run:
        yield _tiny_profile()
        return
    found = bytescale("profile-hardware", RECIPE, "--out", str(folder / "calibration.json"))["hardware"]
    yield {"hardware": found, "data_sheet": vars(nominal(CLUSTER))}


def _tiny_profile() -> Row:
    """What `profile` returns, of two CPU ranks that measure for a second."""
    from bytescale_cli.profile_hardware import payload
    from engine.config.load import load
    from engine.hardware.profile import profile as measure

    found = measure(load(["cluster.device_memory=640M", "cluster.headroom=0"]), 0, lambda text: None, seconds=1.0)
    return {"hardware": payload(found), "data_sheet": vars(nominal("local"))}


SECTIONS: dict[str, Callable[[Path, bool], Iterator[Row]]] = {"tests": tests, "training": training, "profile": profile}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # removes the temporary folder, as after Ctrl-C
    main()
