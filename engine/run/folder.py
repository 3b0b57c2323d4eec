"""The run folder, in which the launcher, the ranks and the report exchange files. Does not import torch."""

from __future__ import annotations

from pathlib import Path


class RunFolder:
    """The paths of the files and folders in the run folder `root`. Nothing is created."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.resolved = root / "resolved.yaml"  # the complete config
        self.summary = root / "summary.json"  # facts of the documents and the model
        self.blocks = root / "blocks.jsonl"  # the blocks of all sources of texts (engine/data/block_files.py)
        self.metrics = root / "metrics.jsonl"  # one JSON object per step
        self.ledger = root / "ledger"  # the documents of each step (engine/data/ledger.py)
        self.quarantine = root / "quarantine.jsonl"  # documents that were left out (engine/data/quarantine.py)
        self.plan = root / "plan.bin"  # of one step, with its measured spans in `trace`
        self.trace = root / "trace.json"
        self.report = root / "report.html"
        self.script = root / "slurm.sh"  # of `--launcher slurm`
        self.manifest = root / "k8s.yaml"  # of `--launcher k8s`
        self.checkpoints = root / "checkpoints"  # step-00000100, ...
        self.logs = root / "logs"

    def log(self, rank: int) -> Path:
        """The file with everything that a rank prints."""
        return self.logs / f"rank-{rank}.log"

    def node_log(self, number: int) -> Path:
        """The file with everything that the agent of a node, or ssh, prints on its standard error."""
        return self.logs / f"node-{number}.log"

    def launch(self, key: str) -> Path:
        """The file through which the other processes of a launch find its launcher (engine/launch/join.py)."""
        return self.logs / f"launch-{key}.json"

    def error(self, rank: int) -> Path:
        """The JSON file in which a rank writes why it failed."""
        return self.logs / f"rank-{rank}.error.json"
