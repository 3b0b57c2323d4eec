"""Functions that the GPU benchmarks share: options, exit codes, a process per case, and the JSON output."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from benchmarks.driver import origin
from engine.files import write_durably
from engine.hardware.timing import timed
from engine.launch.agents.commands import ALLOCATORS
from engine.offload.peak import peak_bytes
from engine.selection import first_line

Row = dict[str, Any]  # a case, and its figures or its `error`
MISSED = 4  # exit code: all cases ran, but one missed its target


class Options(NamedTuple):
    """The options of the command line."""

    json: Path | None
    only: str | None = None
    dry_run: bool = False


def parse_options(description: str | None, sections: Sequence[str] = ()) -> Options:
    """Parse the command line. Exits with code 3 and one sentence if there is no CUDA device and it is no dry run."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    if sections:
        parser.add_argument("--only", choices=sections, help="run one section only")
    parser.add_argument("--dry-run", action="store_true", help="run the same code in tiny sizes on the CPU")
    found = Options(**vars(parser.parse_args()))
    if found.dry_run:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before CUDA starts: the processes of cases inherit it
    elif not torch.cuda.is_available():
        print("no CUDA device found: nothing was measured", file=sys.stderr)
        sys.exit(3)
    return found


def alone(case: Row, work: Callable[..., Row], *arguments: Any) -> Row:
    """Run `work` in a new process with the allocator settings of training; returns `case` with the figures added.

    A case that fails for any reason is printed and recorded in its row, and the others still run.
    """
    for name, value in ALLOCATORS.items():
        os.environ.setdefault(name, value)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return case | pool.submit(work, *arguments).result()
        except Exception as error:
            return failed(case, error)


def failed(case: Row, error: Exception) -> Row:
    """Print that a case failed; returns the case with its error added."""
    print(f"- {', '.join(map(str, case.values()))}: failed: {first_line(error)}", flush=True)
    return case | {"error": first_line(error)}


def leave(rows: Sequence[Row], dry_run: bool = False) -> NoReturn:
    """Exit with code 1 if a case failed, with MISSED if a case only missed its target, else with 0.

    In a dry run targets do not count.
    """
    if any("error" in row for row in rows):
        sys.exit(1)
    sys.exit(0 if dry_run or all(row.get("holds", True) for row in rows) else MISSED)


def device_of(options: Options) -> torch.device:
    """The GPU, or the CPU in a dry run."""
    return torch.device("cpu") if options.dry_run else torch.device("cuda", 0)


def milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """Time of one run on the device, in ms: between events on a GPU, which leaves out what the host does before."""
    if device.type != "cuda":
        return 1e3 * timed(run, device)()[0]
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def repeated(run: Callable[[], float], most: int, most_s: float) -> list[float]:
    """Call `run`, which returns the seconds it took, `most` times, or fewer if that takes more than `most_s` seconds.

    It is called at least three times, so that a median means something, unless `most` is less.
    """
    taken: list[float] = []
    while len(taken) < most and (len(taken) < 3 or sum(taken) < most_s):
        taken.append(run())
    return taken


def allocated(device: torch.device) -> int:
    """Bytes of tensors on a GPU now; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def new_peak(device: torch.device) -> int:
    """Peak bytes since the last call; on a CPU since the process started (see `peak_bytes`)."""
    most = peak_bytes(device) or 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    return most


def write(path: Path | None, device: torch.device, **figures: Any) -> None:
    """Write the figures as JSON, with the device, machine, commit and command line, if a path is given."""
    if path is not None:
        write_durably(path, (json.dumps({**origin(), **machine(device), **figures}, indent=1) + "\n").encode())


def machine(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"device": name, "torch": torch.__version__}
