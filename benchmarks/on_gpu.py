"""What benchmarks of a GPU share: options, exit codes (3: there is none), a process for each case, what is written."""

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

from engine.close import in_a_line
from engine.launch.commands import ALLOCATORS
from engine.memory.peak import peak_bytes

Row = dict[str, Any]  # of a case: what it is, and its figures or its `error`


class Asked(NamedTuple):
    """What the command line says."""

    json: Path | None
    only: str | None = None


def asked(description: str | None, sections: Sequence[str] = ()) -> Asked:
    """Return the file that `--json` names, and which section `--only` does. Leaves with 3, and one sentence, without a
    CUDA device."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    if sections:
        parser.add_argument("--only", choices=sections, help="one part of it")
    found = Asked(**vars(parser.parse_args()))
    if not torch.cuda.is_available():
        print("There is no CUDA device here: nothing was measured.", file=sys.stderr)
        sys.exit(3)
    return found


def alone(case: Row, work: Callable[..., Row], *arguments: Any) -> Row:
    """Return a case's row with what `work` gives in a process that has done nothing else, with the allocators' settings
    of training.

    A case that fails, whatever of, is told, and its row says why: the others are measured all the same.
    """
    for name, value in ALLOCATORS.items():
        os.environ.setdefault(name, value)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return case | pool.submit(work, *arguments).result()
        except Exception as error:
            return failed(case, error)


def failed(case: Row, error: Exception) -> Row:
    """Tell that a case failed, and return its row."""
    print(f"- {', '.join(map(str, case.values()))}: failed: {in_a_line(error)}", flush=True)
    return case | {"error": in_a_line(error)}


def leave(rows: Sequence[Row]) -> NoReturn:
    """End the program: with 1 if a case failed or missed its target."""
    sys.exit(any("error" in row or not row.get("holds", True) for row in rows))


def allocated(device: torch.device) -> int:
    """Return the bytes of tensors that are on a GPU now; 0 elsewhere."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def new_peak(device: torch.device) -> int:
    """Return the most that was held since this was called last (`peak_bytes`); a process on a CPU: ever."""
    most = peak_bytes(device) or 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    return most


def write(path: Path | None, device: torch.device, **figures: Any) -> None:
    """Write figures of a device as JSON, if a file was named."""
    if path is not None:
        machine = {"device": torch.cuda.get_device_name(device), "torch": torch.__version__}
        path.write_text(json.dumps(machine | figures, indent=1) + "\n", encoding="utf-8")
