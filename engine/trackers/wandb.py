"""Runs of Weights & Biases. Its environment variables apply: WANDB_API_KEY, WANDB_PROJECT, WANDB_MODE=offline, ...

Its files are in RUN/trackers/wandb; `wandb sync` sends those of offline runs.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence

from engine.trackers.tracker import Step, Tracked


class WeightsAndBiases:
    """A run that is continued under its id. Only the config and the metrics are sent.

    Without these settings, the library also records the command line, the difference from the last git commit, what
    this process prints, and the load of this host, which is that of one host of the run.
    """

    def __init__(self, run: Tracked) -> None:
        import wandb

        quiet = wandb.Settings(
            console="off", disable_git=True, disable_code=True, x_disable_meta=True, x_disable_stats=True
        )
        self.id = run.id or secrets.token_hex(4)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "bytescale",
            id=self.id,
            name=run.name,
            dir=run.folder,
            config=dict(run.config),
            resume="allow",
            allow_val_change=True,
            settings=quiet,
        )

    def log(self, steps: Sequence[Step]) -> None:
        for step in steps:
            self._run.log(dict(step.metrics), step=step.number)

    def close(self) -> None:
        self._run.finish()
