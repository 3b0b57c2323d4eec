"""The run folder: what lies where. The launcher, the ranks and the report agree through it; no torch here.

```
RUN/resolved.yaml   the config, whole           RUN/metrics.jsonl   one object a step
RUN/index.npz       the documents               RUN/summary.json    corpus and model
RUN/plan.bin, trace.json  one measured step     RUN/report.html
RUN/checkpoints/step-00000100/                  RUN/logs/rank-0.log, rank-0.error.json
```
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.files import write_durably


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run."""

    root: Path

    @property
    def resolved(self) -> Path:
        """Return the resolved config."""
        return self.root / "resolved.yaml"

    @property
    def index(self) -> Path:
        """Return the index of the documents."""
        return self.root / "index.npz"

    @property
    def metrics(self) -> Path:
        """Return the metrics, one JSON object a step."""
        return self.root / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """Return the facts of corpus and model."""
        return self.root / "summary.json"

    @property
    def plan(self) -> Path:
        """Return the plan of the traced step."""
        return self.root / "plan.bin"

    @property
    def trace(self) -> Path:
        """Return the measured spans of the traced step."""
        return self.root / "trace.json"

    @property
    def report(self) -> Path:
        """Return the page."""
        return self.root / "report.html"

    @property
    def checkpoints(self) -> Path:
        """Return the folder of checkpoints."""
        return self.root / "checkpoints"

    @property
    def logs(self) -> Path:
        """Return the folder of the ranks' logs."""
        return self.root / "logs"

    def log(self, rank: int) -> Path:
        """Return a rank's log."""
        return self.logs / f"rank-{rank}.log"

    def error(self, rank: int) -> Path:
        """Return where a rank says why it failed."""
        return self.logs / f"rank-{rank}.error.json"


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object durably."""
    write_durably(path, (json.dumps(value) + "\n").encode())
