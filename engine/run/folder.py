"""The run folder, in which the launcher, the ranks and the report exchange files. Does not import torch.

```
RUN/resolved.yaml         the complete config
RUN/index.npz             the documents: their lengths and places
RUN/summary.json          facts of the corpus and the model
RUN/metrics.jsonl         one JSON object per step
RUN/plan.bin, trace.json  plan and measured spans of one step
RUN/report.html
RUN/checkpoints/step-00000100/
RUN/logs/rank-0.log, rank-0.error.json
```
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunFolder:
    """The paths of the files and folders in a run folder."""

    root: Path

    @property
    def resolved(self) -> Path:
        return self.root / "resolved.yaml"

    @property
    def index(self) -> Path:
        return self.root / "index.npz"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def plan(self) -> Path:
        return self.root / "plan.bin"

    @property
    def trace(self) -> Path:
        return self.root / "trace.json"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def log(self, rank: int) -> Path:
        """The file with everything that a rank prints."""
        return self.logs / f"rank-{rank}.log"

    def error(self, rank: int) -> Path:
        """The JSON file in which a rank writes why it failed."""
        return self.logs / f"rank-{rank}.error.json"
