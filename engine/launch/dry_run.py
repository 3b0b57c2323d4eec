"""Describes what a launch would do: the settings, the next steps, and the commands that start agents and ranks."""

from __future__ import annotations

import shlex
from typing import Any

from engine.errors import Problem
from engine.launch.launch import Launch
from engine.launch.prepare import Start
from engine.planner.plan.loads import micro_tokens
from engine.report.words import source
from engine.simulator.hollow import empty_capacity, low_balance, small_corpus
from engine.simulator.timeline import balance

PLANNED = 3  # steps that a dry run plans
_COMMANDS = 2**14  # most nodes whose commands are listed


def dry_run_of(launch: Launch, start: Start, refused: list[Problem]) -> dict[str, Any]:
    """Build the JSON of a dry run, and say its warnings.

    `refused` are the problems that would prevent a launch. `commands` start the agents of at most _COMMANDS nodes, and
    none if all steps are done; `program` is what each agent starts for each of its ranks. `forwarded` names the
    variables that ranks on other hosts get from this environment, `withheld` those that look like secrets and stay
    here, `not_forwarded` others of libraries that stay here.
    """
    config, cluster, users = launch.job.config, launch.job.cluster, launch.forwarded()
    settings, known = launch.job.settings, start.corpora.overview
    commands = launch.commands(start.checkpoint, _COMMANDS) if start.plans else []
    balances = [balance(plan, settings) for plan in start.plans]
    warnings = small_corpus(config, start.corpora.tokens)
    if start.plans:
        warnings += low_balance(config, sum(balances) / len(balances))
        warnings += empty_capacity(config, settings.ranks, max(int(micro_tokens(plan).max()) for plan in start.plans))
    for warning in warnings:
        launch.say(str(warning))
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
                "step": start.step + 1 + number,
                "sequences": plan.sequences,
                "tokens": int(plan.lengths.sum()),
                "micro_batches": plan.micro_batches,
                "max_degree": int(plan.degrees.max()),
                "balance": balances[number],
            }
            for number, plan in enumerate(start.plans)
        ],
        # Names only: values may be private. `commands` leaves these variables out.
        "forwarded": list(users.variables),
        "withheld": users.withheld,
        "not_forwarded": users.left,
        "nodes": len(cluster.nodes),
        "commands": [str(command) for command in commands],
        "program": shlex.join(commands[0].work.ranks[0][1]) if commands else None,
        "warnings": [warning._asdict() for warning in warnings],
        "refused": [{"key": problem.key, "message": problem.message, "hint": problem.hint} for problem in refused],
    }
