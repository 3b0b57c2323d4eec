"""From a run folder to its page."""

from __future__ import annotations

from pathlib import Path

from engine.files import write_durably
from engine.report.data import RunData, read_run
from engine.trainer.folder import RunFolder

__all__ = ["RunData", "read_run", "write_report"]


def write_report(folder: Path) -> Path:
    """Write RUN/report.html from what the run folder holds, whole or not at all; return its path.

    Raises ConfigError if the folder has no readable resolved.yaml.
    """
    # The launcher imports this file before it starts the ranks; matplotlib can wait until they are done.
    from engine.report.run_page import run_page

    path = RunFolder(folder).report
    write_durably(path, run_page(read_run(folder)).html().encode())
    return path
