"""What a start would do, without doing it: what is planned with what, the next steps, and the ranks' commands."""

from __future__ import annotations

from typing import Any

from engine.cluster.cluster import Cluster
from engine.config.schema import Config
from engine.errors import Problem
from engine.launch.commands import free_port, rank_commands
from engine.launch.prepare import Start
from engine.planner.make import PlanSettings
from engine.planner.plan import StepPlan
from engine.report.words import source
from engine.simulator.timeline import balance
from engine.trainer.folder import RunFolder

PLANNED = 3  # steps
_COMMANDS = 2**14  # as many ranks as the paper's largest run; of millions nobody needs all


def dry_run_of(
    config: Config, cluster: Cluster, folder: RunFolder, start: Start, refused: list[Problem]
) -> dict[str, Any]:
    """Return what the command prints as JSON; the first commands, none if no step is left to run."""
    settings = PlanSettings.of(config)
    steps = [_step(number, plan, settings) for number, plan in enumerate(start.plans, start=start.step + 1)]
    commands = rank_commands(cluster, folder, start.checkpoint, free_port(), _COMMANDS) if steps else []
    return {
        "ranks": cluster.ranks,
        "hdp_ranks": settings.ranks,
        "tp": config.parallel.tp,
        "pp": config.parallel.pp,
        "out": str(folder.root),
        "source": f"data.path={config.data.path}",
        "plan_source": source(config),
        "documents": len(start.index.training),
        "planner": settings.planner,
        "mode": settings.mode,
        "outlook": start.outlook(config),
        "checkpoint": str(start.checkpoint) if start.checkpoint else None,
        "steps_done": start.step,
        "steps": steps,
        "commands": [str(command) for command in commands],
        "refused": [{"key": lack.key, "message": lack.message, "hint": lack.hint} for lack in refused],
    }


def _step(number: int, plan: StepPlan, settings: PlanSettings) -> dict[str, Any]:
    return {
        "step": number,
        "sequences": plan.sequences,
        "tokens": int(plan.lengths.sum()),
        "micro_batches": plan.micro_batches,
        "max_degree": int(plan.degrees.max()),
        "balance": balance(plan, settings),
    }
