"""`bytescale chaos`: harms a run that allows it, to see how it recovers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bytescale_cli import output
from bytescale_cli.options import Debug, Json, check_at_least, choice, whole_number
from engine.control.chaos import FAULTS, OF_RANKS, Fault
from engine.errors import ConfigError

_TAKERS = {  # which faults have a flag
    **dict.fromkeys(("rank", "at", "step"), OF_RANKS),
    "times": tuple(fault for fault in OF_RANKS if fault != "slow-rank"),  # which lasts
    "factor": ("slow-rank",),
}


def chaos(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(metavar="RUN", readable=False, help="Run folder.")],
    fault: Annotated[str, typer.Argument(parser=choice(*FAULTS), metavar="FAULT", help=f"{', '.join(FAULTS)}.")],
    rank: Annotated[int, typer.Option(parser=whole_number, metavar="N", help="The rank to harm.")] = 0,
    at: Annotated[
        str | None, typer.Option(metavar="PHASE", help="Wait until the rank begins this phase, such as backward.")
    ] = None,
    step: Annotated[int, typer.Option(parser=whole_number, metavar="N", help="Wait until this step.")] = 0,
    times: Annotated[int, typer.Option(parser=whole_number, metavar="N", help="Do it N times, after restarts.")] = 1,
    factor: Annotated[
        float, typer.Option(metavar="F", help="slow-rank: passes take F times as long; 1 ends it.")
    ] = 2.0,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Harm a run to see how it recovers. Only a run with run.chaos=true allows it.

    Faults of ranks happen at the rank's next phase: kill-rank (SIGKILL), stop-rank (SIGSTOP), slow-rank, cut-link (ends
    its connections to other ranks). corrupt-checkpoint flips a bit of the newest checkpoint; fill-disk fills the disk
    of the run folder.
    """
    # Every flag has a default, so only flags on the command line can be rejected as those of another fault.
    for flag, takers in _TAKERS.items():
        source = context.get_parameter_source(flag)
        if source is not None and source.name == "COMMANDLINE" and fault not in takers:
            hint = f"remove it; it is for {', '.join(takers)}"
            raise ConfigError(f"is not a flag of {fault}", key=f"--{flag}", hint=hint)
    check_at_least(0, step, "--step")
    check_at_least(1, times, "--times")
    if not 1 <= factor <= 1000:
        raise ConfigError(f"must be from 1 to 1000, not {factor:g}", key="--factor", hint="for example --factor 2")
    from engine.launch.chaos import harm
    from engine.run.folder import changing

    # Harming a run writes to its folder, which may belong to another user.
    with changing(run):
        done = harm(run, Fault(fault, at, step, times, factor), rank)
    answer = {"run": str(run), "fault": fault, "rank": rank, "at": at, "step": step, "did": done}
    output.emit({"chaos": answer}, output.fill(done), as_json=json)
