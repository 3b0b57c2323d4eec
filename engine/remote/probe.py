"""Asks a cluster of Ray for its version and resources: `python -m engine.remote.probe HOST:PORT`, within seconds.

`ray.init` would not return for minutes where no process listens, and never with a wrong token. Prints a JSON object.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from engine.errors import Problem
from engine.readers import parse_line
from engine.remote import checks
from engine.remote.plane import AUTH_MODE, host_resource
from engine.safe_path import safe_path
from engine.selection import first_line

_ANSWER_S = 3.0  # of the cluster
_NAMED = 8  # most resources in a message
_TIMEOUT_S = 9.0  # of all, with the import of Ray


def cluster_problem(address: str, hosts: int, variables: Mapping[str, str] = os.environ) -> Problem | None:
    """Return the problem if a run on `hosts` cannot use the cluster at HOST:PORT.

    Nothing answers there, or what answers has another token, another version, or no node for some host. `variables`
    name the token, as Ray reads them.
    """
    problem = checks.version_problem() or checks.token_problem(variables) or checks.address_problem(address)
    if problem is not None:
        return problem
    key = f"data.ray.address={address}"
    environment = {**variables, **safe_path(), AUTH_MODE: "token"}
    command = [sys.executable, "-m", "engine.remote.probe", address]
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S
        )
        found = parse_line(done.stdout)
    except subprocess.TimeoutExpired:
        message = f"what listens at {address} does not answer as Ray within {_TIMEOUT_S:.0f} s"
        return Problem(message, key, "`ray status` must work there; or set data.ray.address=null")
    except ValueError:
        found = {"error": first_line(RuntimeError(done.stderr.decode(errors="replace").strip() or "no answer"))}
    if "error" in found:
        hint = "the token must be that of the cluster (RAY_AUTH_TOKEN_PATH), and its Ray must use RAY_AUTH_MODE=token"
        why = found["error"].partition(". ")[0]  # further sentences advise
        return Problem(f"the Ray at {address} rejects this host: {why}", key, hint)
    if found["version"] != checks.version():
        message = f"the Ray at {address} is {found['version']}, but {checks.version()} is installed here"
        return Problem(message, key, f"`pip install ray=={found['version']}` on all hosts")
    missing = [name for name in map(host_resource, range(hosts)) if name not in found["resources"]]
    if missing:
        message = f"the Ray at {address} has no node with the resource {', '.join(missing[:_NAMED])}"
        option = f"--resources='{{\"{missing[0]}\": 1000}}'"
        return Problem(message, key, f"start the node of each host of the run with its resource: `ray start {option}`")
    return None


def main() -> None:
    """Print what the cluster says."""
    answers = os.dup(1)
    os.dup2(2, 1)
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    answer: dict[str, Any]
    try:
        client = GcsClient(address=sys.argv[1])
        facts = client.internal_kv_get(b"CLUSTER_METADATA", b"cluster", timeout=_ANSWER_S)
        nodes = client.get_all_node_info(timeout=_ANSWER_S)
        resources = {name for node in nodes.values() for name in node.resources_total}
        answer = {"version": parse_line(facts or b"{}").get("ray_version"), "resources": sorted(resources)}
    except Exception as error:  # whatever Ray raises, it is the answer
        answer = {"error": first_line(error)}
    os.write(answers, json.dumps(answer).encode() + b"\n")
    os._exit(0)


if __name__ == "__main__":
    main()
