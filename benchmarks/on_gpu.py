"""What benchmarks of a GPU share: their one option, and that they leave with 3 where there is none."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch


def asked(description: str | None) -> Path | None:
    """Return the file that `--json` names. Leaves with 3, and one sentence, without a CUDA device."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    path: Path | None = parser.parse_args().json
    if not torch.cuda.is_available():
        print("There is no CUDA device here: nothing was measured.", file=sys.stderr)
        sys.exit(3)
    return path


def write(path: Path | None, device: torch.device, **figures: Any) -> None:
    """Write figures of a device as JSON, if a file was named."""
    if path is not None:
        machine = {"device": torch.cuda.get_device_name(device), "torch": torch.__version__}
        path.write_text(json.dumps(machine | figures, indent=1) + "\n", encoding="utf-8")
