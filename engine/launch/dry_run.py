"""Describes what a launch would do: the settings, the next steps, and the commands that start agents and ranks."""

from __future__ import annotations

import shlex
from typing import Any

from engine.errors import Problem
from engine.launch.launch import Launch
from engine.launch.prepare import Start
from engine.planner.settings import PlanSettings
from engine.report.words import source
from engine.simulator.timeline import balance

PLANNED = 3  # steps that a dry run plans
_COMMANDS = 2**14  # most nodes whose commands are listed


def dry_run_of(launch: Launch, start: Start, refused: list[Problem]) -> dict[str, Any]:
    """Build the JSON of a dry run. `refused` are the problems for which a launch would be refused.

    `commands` start the agents of at most _COMMANDS nodes, and none if all steps are done; `program` is what each agent
    starts for each of its ranks. `forwarded` names the variables that ranks on other hosts get from this environment,
    `withheld` those that look like secrets and stay here, `not_forwarded` others of libraries that stay here.
    """
    config, cluster, users = launch.config, launch.cluster, launch.forwarded()
    settings, known = PlanSettings.of(config), start.corpora.overview
    commands = launch.commands(start.checkpoint, _COMMANDS) if start.plans else []
    return {
        "ranks": cluster.ranks,
        "hdp_ranks": settings.ranks,
        "tp": config.parallel.tp,
        "pp": config.parallel.pp,
        "ep": config.parallel.ep,
        "out": str(launch.folder.root),
        "source": config.data.place,
        "plan_source": source(config),
        "documents": known and known.training,
        "planner": settings.planner,
        "mode": settings.mode,
        "outlook": start.outlook(config),
        "checkpoint": str(start.checkpoint) if start.checkpoint else None,
        "steps_done": start.step,
        "steps": [
            {
                "step": number,
                "sequences": plan.sequences,
                "tokens": int(plan.lengths.sum()),
                "micro_batches": plan.micro_batches,
                "max_degree": int(plan.degrees.max()),
                "balance": balance(plan, settings),
            }
            for number, plan in enumerate(start.plans, start=start.step + 1)
        ],
        # Names only: values may be private. `commands` leaves these variables out.
        "forwarded": list(users.variables),
        "withheld": users.withheld,
        "not_forwarded": users.left,
        "nodes": len(cluster.nodes),
        "commands": [str(command) for command in commands],
        "program": shlex.join(commands[0].job["ranks"][0][1]) if commands else None,
        "refused": [{"key": problem.key, "message": problem.message, "hint": problem.hint} for problem in refused],
    }
