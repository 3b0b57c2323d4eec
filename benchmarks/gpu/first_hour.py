"""The first half hour on a GPU: every measurement that this repository waits for, the most informative first.

    python benchmarks/gpu/first_hour.py [--out DIR] [--budget 28m] [--call N] [--only PART[,PART]] [--list] [--dry-run]

    PARTS --in_order--> run: a process with a time limit --> DIR/PART.json (as it goes), DIR/PART.log
              ^           |  exit code 0: done; 4: missed; else: failed; at its limit: timed out
              |           v
              +--- DIR/outcomes.json ----> advice.py: what to change, printed at the end

A part that fails or is stopped does not stop the others. Run the command again to continue: parts that are done are
skipped, new ones come first, then those in which a case failed, or that were stopped.

All limits together are longer than the default budget; --list prints their sum. A part does not start with less time
than half of its limit, or than it took before. The result of the run before is kept as DIR/PART.old.

--budget 15m is a separate plan for a GPU lent for 15 minutes, its start included: three calls, of which --call N
runs one, so that results can be fetched in between. `prepared.py` runs before, where there is no GPU: then plans,
packages that are missing and a newer NCCL come from prepared/. docs/gpu.md, "A GPU for 15 minutes", has the commands.

--dry-run runs the code of every part in tiny sizes on the CPU, and prints the keys of its JSON. Exit codes: 0 if all
selected parts are done; 1 if not; 3 without torch. This program needs the standard library only.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import invalidate_caches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu.advice import advice

ROOT, FOLDER = Path(__file__).parents[2], Path(__file__).parent
GRACE_S = 10.0  # after SIGTERM, before SIGKILL
MISSED = 4  # exit code of a part: all cases ran, but one missed its target. As in on_gpu.py, which imports torch
DONE = ("done", "missed")  # states of parts that are not run again
# Modules that the parts import, and the packages that have them.
NEEDED = {
    "torch": "torch",
    "deepspeed": "deepspeed",
    "hydra": "hydra-core",
    "omegaconf": "omegaconf",
    "pydantic": "pydantic",
    "numba": "numba",
    "numpy": "numpy",
    "yaml": "pyyaml",
    "typer": "typer",
    "rich": "rich",
    "safetensors": "safetensors",
    "pytest": "pytest",
}


@dataclass(frozen=True)
class Part:
    """A program in this folder with its arguments, and the seconds after which it is stopped."""

    name: str
    limit_s: float
    command: tuple[str, ...]
    answers: str


PARTS = (
    Part("machine", 60, ("machine.py",), "versions, memory, packages, the selected attention kernel"),
    Part("parts", 90, ("parts.py",), "rates of products, weight gradients, FP8, packs, loss and update"),
    Part("tests", 240, ("commands.py", "--only", "tests"), "the tests that need a GPU"),
    Part("probe", 240, ("probe.py",), "cuDNN's plan builds and NaNs, a ring of 8, cuDNN against varlen"),
    Part("attention", 180, ("attention.py",), "kernels, packing, a ring of 8, and steps of real plans"),
    Part("train", 300, ("train.py", "--only", "cases"), "tokens/s and MFU of 1B and 8B-shaped models, 8K to 64K"),
    Part("train-plan", 150, ("train.py", "--only", "plan"), "steps of real plans with each kernel, new and seen"),
    Part("train-trace", 90, ("train.py", "--only", "trace"), "kernels, launches and idle time of a micro-batch"),
    Part("training", 240, ("commands.py", "--only", "training"), "`bytescale train`, then resumed"),
    Part("memory-trace", 90, ("memory.py", "--only", "trace"), "overlap of offload's copies"),
    Part("memory-time", 240, ("memory.py", "--only", "time"), "time that offload adds"),
    Part("memory-peak", 330, ("memory.py", "--only", "peak"), "peak memory against the estimate"),
    Part("one-rank-1m", 180, ("one_rank_1m.py",), "one rank's part of a step of 1M tokens, and the step"),
    Part("nccl", 240, ("nccl.py",), "several ranks on this GPU: groups, losses, faults"),
    Part("profile", 150, ("commands.py", "--only", "profile"), "the calibration, against the data sheet"),
    Part("longest", 300, ("memory.py", "--only", "longest"), "the longest context of the 1B recipe"),
)


@dataclass(frozen=True)
class Call:
    """Parts that run one after another in at most so many seconds."""

    seconds: float
    parts: tuple[Part, ...]


# The plan for 15 minutes: where the time goes; what was never measured; several ranks on this GPU.
QUARTER = (
    Call(
        300,
        (
            Part("machine", 20, ("machine.py",), "versions, memory, packages, the selected attention kernel"),
            Part("parts", 60, ("parts.py",), "rates of products, weight gradients, FP8, packs, loss and update"),
            Part("train-trace", 70, ("train.py", "--only", "trace"), "milliseconds by class of kernel, launches, idle"),
            Part("rates", 50, ("probe.py", "--only", "rates"), "attention at head sizes of 64 and 128, 8K to 64K"),
            Part("train-plan", 100, ("train.py", "--only", "plan"), "steps of real plans with each kernel"),
        ),
    ),
    Call(
        180,
        (
            Part("one-rank-1m", 110, ("one_rank_1m.py",), "one rank's part of a step of 1M tokens, and the step"),
            Part("train-missing", 70, ("train.py", "--only", "missing"), "tokens/s and MFU that no GPU has shown yet"),
        ),
    ),
    Call(180, (Part("nccl", 180, ("nccl.py",), "several ranks on this GPU: groups, losses, faults"),)),
)
QUARTER_S = 900.0


@dataclass(frozen=True)
class Outcome:
    """How a part ended.

    `state` is `done`; `missed` if all cases ran, but one missed its target; `failed`, also if only one case failed; or
    `timed out`.
    """

    state: str
    seconds: float
    limit_s: float
    cause: str = ""  # the last line of the log, unless it is done
    wrote: bool = True  # if not, its JSON is that of an earlier run, or missing


def main(arguments: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Run the parts; return the exit code."""
    options = parse(arguments, [*parts, *(part for call in QUARTER for part in call.parts)])
    calls = calls_of(options, parts)
    parts = [part for call in calls for part in call.parts]
    if options.list:
        for part in parts:
            print(f"{part.name:13} at most {part.limit_s:4.0f} s  {part.answers}")
        print(f"all: at most {sum(part.limit_s for part in parts) / 60:.0f} minutes")
        return 0
    began = time.monotonic()
    if not options.dry_run:
        unpack()
    if missing := not_installed():
        install("wheels")
        missing = not_installed()
    if missing:
        print(f"not installed: {', '.join(missing)}; parts that need them fail", file=sys.stderr)
        if "torch" in missing:
            return 3
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    outcomes = read_outcomes(out)
    selected = [part for part in parts if part.name in options.only] if options.only else parts
    # An explicit selection runs again even if it is done.
    todo = selected if options.only else in_order(selected, outcomes)
    for part in selected:
        if part not in todo:
            print(f"{part.name}: {outcomes[part.name].state} before, skipped", flush=True)
    try:
        for call in calls:
            run_call(
                [part for part in todo if part in call.parts], began + call.seconds, out, outcomes, options.dry_run
            )
            began = time.monotonic()
    except KeyboardInterrupt:
        print("stopped; run the same command to continue", file=sys.stderr)
    summarise(out, selected, outcomes, keys=options.dry_run)
    return 0 if all(part.name in outcomes and outcomes[part.name].state in DONE for part in selected) else 1


def calls_of(options: argparse.Namespace, parts: Sequence[Part]) -> list[Call]:
    """All parts in one call, or the calls of the plan of 15 minutes. A dry run has enough time: no GPU is lent."""
    if options.budget != QUARTER_S:
        return [Call(options.budget, tuple(parts))]
    calls = [QUARTER[options.call - 1]] if options.call else list(QUARTER)
    if not options.dry_run:
        return calls
    slow = [[replace(part, limit_s=10 * part.limit_s) for part in call.parts] for call in calls]
    return [Call(sum(part.limit_s for part in parts), tuple(parts)) for parts in slow]


def run_call(todo: Sequence[Part], deadline: float, out: Path, outcomes: dict[str, Outcome], dry_run: bool) -> None:
    """Run parts one after another until the deadline. Each outcome is written at once."""
    for part in todo:
        left = deadline - time.monotonic()
        if left < (least := least_s(part, outcomes.get(part.name))):
            print(f"{part.name}: not started, {max(left, 0):.0f} s left of at least {least:.0f} s", flush=True)
            continue
        print(f"{part.name}: {part.answers} (at most {min(part.limit_s, left):.0f} s)", flush=True)
        outcome = run(part, out, left, dry_run)
        outcomes[part.name] = outcome
        write_outcomes(out, outcomes)
        cause = f": {outcome.cause}" if outcome.cause else ""
        print(f"{part.name}: {outcome.state} after {outcome.seconds:.0f} s{cause}", flush=True)


def not_installed() -> list[str]:
    """The packages that parts need and this Python lacks."""
    invalidate_caches()
    return [package for module, package in NEEDED.items() if find_spec(module) is None]


def unpack() -> None:
    """Unpack what prepared.py has packed: NCCL's library, and large wheels, which are installed.

    A wheel of which a piece is missing is left out.
    """
    packed = defaultdict[str, list[Path]](list)
    for path in sorted((ROOT / "prepared").glob("*/*.xz")):
        packed[path.stem].append(path)
    wheels = ROOT / "prepared" / "large"
    for name, paths in packed.items():
        target = (wheels if name.endswith(".whl") else paths[0].parent) / name
        if target.exists():
            continue
        try:
            content = lzma.decompress(b"".join(path.read_bytes() for path in paths))
        except lzma.LZMAError as error:
            print(f"{name}: {len(paths)} pieces are not all of it: {error}", file=sys.stderr)
            continue
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(content)
        if target.parent == wheels:
            install("large")


def install(folder: str) -> None:
    """Install the wheels in a folder of prepared/, if there are any. Nothing is fetched."""
    if wheels := [str(wheel) for wheel in sorted((ROOT / "prepared" / folder).glob("*.whl"))]:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", *wheels]
        subprocess.run(command, check=False)


def parse(arguments: Sequence[str] | None, parts: Sequence[Part]) -> argparse.Namespace:
    """Parse the command line. Exits with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the results (first_hour, or dry_run)")
    parser.add_argument("--budget", type=duration, default=duration("28m"), help="time for all parts: 28m, 90s, 1h")
    parser.add_argument("--only", type=lambda text: text.split(","), help="run these parts, even if they are done")
    parser.add_argument("--list", action="store_true", help="print the parts and end")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU; prints the keys of each JSON")
    parser.add_argument("--call", type=int, choices=range(1, len(QUARTER) + 1), help="of --budget 15m: only this call")
    options = parser.parse_args(arguments)
    if options.call and options.budget != QUARTER_S:
        parser.error("--call needs --budget 15m")
    names = list(dict.fromkeys(part.name for part in parts))
    if unknown := [name for name in options.only or () if name not in names]:
        parser.error(f"unknown part {unknown[0]}; the parts are {', '.join(names)}")
    # A dry run has its own folder: its results must not count as measured.
    options.out = options.out or Path("dry_run" if options.dry_run else "first_hour")
    return options


def duration(text: str) -> float:
    """Convert 28m, 90s or 1h to seconds. Raises ValueError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if found is None:
        raise ValueError(f"not a duration: {text}")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]


def in_order(parts: Sequence[Part], outcomes: Mapping[str, Outcome]) -> list[Part]:
    """The parts to run: those that never ran, then those that failed or were stopped; not those that are done."""
    new = [part for part in parts if part.name not in outcomes]
    return new + [part for part in parts if part.name in outcomes and outcomes[part.name].state not in DONE]


def least_s(part: Part, before: Outcome | None) -> float:
    """The least time with which a part starts: half of its limit, or what it took if it was done before."""
    half = part.limit_s / 2
    return min(half, before.seconds) if before is not None and before.state in DONE else half


def run(part: Part, out: Path, left_s: float, dry_run: bool) -> Outcome:
    """Run a part for at most `left_s` seconds or its limit; then end it and all processes of its session.

    If it writes no result, that of the run before stays.
    """
    result, old, log = (out / f"{part.name}.{suffix}" for suffix in ("json", "old", "log"))
    if result.exists():
        result.replace(old)
    program, *arguments = part.command
    command = [sys.executable, str(FOLDER / program), *arguments, "--json", str(result.absolute())]
    limit, began, state = min(part.limit_s, left_s), time.monotonic(), "timed out"
    environment = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"} | os.environ  # parts share what flash-attn 4 compiles
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--dry-run"] if dry_run else command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
            state = {0: "done", MISSED: "missed"}.get(code, "failed")
        except subprocess.TimeoutExpired:
            pass
        finally:
            end(process)
            wrote = result.exists()
            if not wrote and old.exists():
                old.replace(result)
    if state in DONE and not wrote:
        state = "failed"
    return Outcome(state, time.monotonic() - began, limit, "" if state == "done" else last_line(log), wrote)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask all processes of a part's session to stop, and kill those that do not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)


def last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else ""


def read_outcomes(out: Path) -> dict[str, Outcome]:
    path = out / "outcomes.json"
    return {name: Outcome(**one) for name, one in read(path).items()} if path.exists() else {}


def write_outcomes(out: Path, outcomes: Mapping[str, Outcome]) -> None:
    text = json.dumps({name: asdict(outcome) for name, outcome in outcomes.items()}, indent=1)
    new = out / "outcomes.json.new"
    new.write_text(text + "\n", encoding="utf-8")
    new.replace(out / "outcomes.json")  # a program that is killed leaves the old file


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def summarise(out: Path, parts: Sequence[Part], outcomes: Mapping[str, Outcome], keys: bool) -> None:
    """Print how each part ended, the keys of its JSON if `keys`, and what to change."""
    print(f"\nresults in {out}:")
    results = {}
    for part in parts:
        outcome, path = outcomes.get(part.name), out / f"{part.name}.json"
        said = f"{outcome.state}, {outcome.seconds:.0f} s" if outcome else "not run"
        earlier = "" if outcome is None or outcome.wrote or not path.exists() else "; its result is of an earlier run"
        print(f"  {part.name:13} {said}{earlier}")
        if path.exists():
            results[part.name] = read(path)
            if keys:
                print(f"    {', '.join(keys_of(results[part.name]))}")
    if lines := advice(results):
        print("\nwhat to change:" if not keys else "\nwhat the advice would be, from figures that mean nothing:")
        for line in lines:
            print(f"- {line}")


def keys_of(result: Mapping[str, Any]) -> list[str]:
    """The keys of a part's JSON; those of its rows as `rows[].key`."""
    rows = [f"rows[].{key}" for row in result.get("rows", []) for key in row]
    return list(dict.fromkeys([*(key for key in result if key != "rows"), *rows]))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the running part, as Ctrl-C does
    sys.exit(main())
