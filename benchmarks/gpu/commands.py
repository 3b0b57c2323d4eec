"""Our own commands on a GPU, as a user runs them, with their results as JSON.

`python benchmarks/gpu/commands.py --only tests|training|profile [--json FILE]`:

    tests     `pytest -m gpu`: how many tests passed, and which failed
    training  `bytescale train recipe=h200-1b-8k` for 15 steps, then resumed for 5 more: the time of each step
    profile   `bytescale profile-hardware`, beside the values of the data sheet

The exit code is 1 if a command fails, and 3 without a CUDA device.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
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
KEYS = ("step", "loss", "step_s", "tokens_per_s", "plan_wait_s", "data_wait_s", "grad_norm")


def main() -> None:
    """Run the selected commands, and print their results."""
    options = on_gpu.parse_options(__doc__, tuple(SECTIONS))
    rows: list[Row] = []
    for section in [options.only] if options.only else SECTIONS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                rows.append({"section": section} | SECTIONS[section](Path(folder), options.dry_run))
                print(json.dumps(rows[-1], indent=1))
            except Exception as error:
                rows.append(on_gpu.failed({"section": section}, error))
        on_gpu.write(options.json, on_gpu.device_of(options), rows=rows)
    on_gpu.leave(rows)


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


def tests(folder: Path, dry_run: bool) -> Row:
    """Run the tests that need a GPU. A dry run selects a few that need none."""
    report = folder / "tests.xml"
    chosen = ["tests/attention/test_layout.py"] if dry_run else ["-m", "gpu"]
    done = run("pytest", "-q", "-x" if dry_run else "--maxfail=20", f"--junitxml={report}", *chosen)
    if not report.exists():
        raise RuntimeError(f"pytest exited with code {done.returncode}: {done.stdout.strip().splitlines()[-1:]}")
    return outcomes(ElementTree.parse(report).getroot())


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


def training(folder: Path, dry_run: bool) -> Row:
    """Train for a few steps, then resume from the last checkpoint for more, in another run folder."""
    out, longer = folder / "run", folder / "longer"
    recipe = ["recipe=quickstart"] if dry_run else [RECIPE]
    steps, more = (2, 1) if dry_run else (STEPS, MORE_STEPS)
    command = ["train", *recipe, "run.validate_every=1000", f"run.checkpoint_every={steps}"]
    bytescale(*command, f"run.out={out}", f"run.steps={steps}")
    checkpoint = out / "checkpoints" / f"step-{steps:08d}"
    bytescale(*command, f"run.out={longer}", f"run.steps={steps + more}", "--resume", str(checkpoint))
    first, resumed = (
        [{key: line.get(key) for key in KEYS} for line in read_metrics(run / "metrics.jsonl")] for run in (out, longer)
    )
    numbers = [line["step"] for line in (*first, *resumed)]
    return {"steps": first, "resumed": resumed, "holds": numbers == list(range(1, steps + more + 1))}


def profile(folder: Path, dry_run: bool) -> Row:
    """Measure this machine, and return the calibration beside the nominal one."""
    if dry_run:
        return _tiny_profile()
    found = bytescale("profile-hardware", RECIPE, "--out", str(folder / "calibration.json"))["hardware"]
    return {"hardware": found, "data_sheet": vars(nominal(CLUSTER))}


def _tiny_profile() -> Row:
    """What `profile` returns, of two CPU ranks that measure for a second."""
    from bytescale_cli.profile_hardware import payload
    from engine.config.load import load
    from engine.hardware.profile import profile as measure

    found = measure(load(["cluster.device_memory=496M"]), 0, lambda text: None, seconds=1.0)
    return {"hardware": payload(found), "data_sheet": vars(nominal("local"))}


SECTIONS: dict[str, Callable[[Path, bool], Row]] = {"tests": tests, "training": training, "profile": profile}


if __name__ == "__main__":
    main()
