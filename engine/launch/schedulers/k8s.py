"""Kubernetes: the manifest of an indexed Job with a pod for each node. It is written, never applied.

Each pod runs `bytescale train`; the pods join each other (engine/launch/schedulers/join.py). A pod that ends with 75,
or because its node is drained, is started again and counts as no failure; 2 and 93 end the job: another attempt would
not help.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from engine.config.devices import uses_gpus
from engine.config.schema import Config
from engine.config.validate import NOT_SET
from engine.errors import ConfigError, ExitCode, Problem
from engine.launch.schedulers.joined import JOB, NODES

_CONTAINER = "train"


def manifest(config: Config, words: Sequence[str]) -> str:
    """Return the YAML of a Service and a Job that train with these words of the command line. Raises ConfigError."""
    k8s = config.k8s
    # All problems are reported together, because a manifest is usually written on another machine than it is applied.
    problems = [
        Problem(NOT_SET, key, f"set {key}={example}, {what}")
        for key, value, what, example in (
            ("k8s.image", k8s.image, "the image that has ByteScale", "registry/bytescale:1"),
            ("k8s.claim", k8s.claim, "the volume claim that all pods share", "training"),
        )
        if value is None
    ]
    out = Path(config.run.out)
    if out.is_absolute() and not out.is_relative_to(k8s.mount):
        what = f"is not below k8s.mount={k8s.mount}, the folder that pods share"
        problems.append(
            Problem(what, f"run.out={out}", f"choose a relative path, one below {k8s.mount}, or another k8s.mount")
        )
    if problems:
        raise ConfigError.of(problems)
    name = _name(config)
    meta = {"name": name, **({"namespace": k8s.namespace} if k8s.namespace else {})}
    # Pods of a Job have names that resolve only with a headless Service. The launcher's must resolve before it is
    # ready, because the others connect to it at its start.
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta,
        "spec": {
            "clusterIP": "None",  # headless: only the names of the pods
            "selector": {"job-name": name},
            "publishNotReadyAddresses": True,
        },
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": meta,
        "spec": {
            "completions": config.cluster.nodes,
            "parallelism": config.cluster.nodes,
            "completionMode": "Indexed",
            "backoffLimit": config.cluster.nodes * (config.run.restarts + 1),  # in each attempt all pods fail
            "podFailurePolicy": {"rules": _RULES},
            "template": {"spec": _pod(config, name, words)},
        },
    }
    return yaml.safe_dump_all([service, job], sort_keys=False, width=120)


def _name(config: Config) -> str:
    """The name of the Service and the Job: at most 51 letters, digits and dashes, to which pods add up to 12.

    Runs of one recipe differ in their run folders, and so in the hash at the end.
    """
    recipe = re.sub(r"[^a-z0-9]+", "-", Path(config.recipe).stem.lower()).strip("-")[:32].rstrip("-") or "run"
    out = os.fsencode(Path(config.k8s.mount) / config.run.out)
    return f"bytescale-{recipe}-{hashlib.blake2b(out, digest_size=4).hexdigest()}"


# The first rule that fits decides; what fits none counts against backoffLimit.
_RULES: list[dict[str, Any]] = [
    {
        "action": "FailJob",
        "onExitCodes": {
            "containerName": _CONTAINER,
            "operator": "In",
            "values": [int(ExitCode.USAGE), int(ExitCode.STUCK)],
        },
    },
    {
        "action": "Ignore",
        "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": [int(ExitCode.PREEMPTED)]},
    },
    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
]


def _pod(config: Config, name: str, words: Sequence[str]) -> dict[str, Any]:
    k8s = config.k8s
    uid = {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"}}
    gpus = {"nvidia.com/gpu": config.cluster.ranks_per_node}
    return {
        "subdomain": name,
        "restartPolicy": "Never",  # podFailurePolicy needs it; the job starts pods again
        "terminationGracePeriodSeconds": k8s.grace,
        "containers": [
            {
                "name": _CONTAINER,
                "image": k8s.image,
                # Kubernetes would replace $(NAME) by a variable of the container.
                "command": ["bytescale", *(word.replace("$(", "$$(") for word in words)],
                "workingDir": k8s.mount,
                "env": [
                    {"name": NODES, "value": str(config.cluster.nodes)},
                    {"name": JOB, "valueFrom": uid},
                    {"name": "MASTER_ADDR", "value": f"{name}-0.{name}"},
                ],
                **({"resources": {"limits": gpus}} if uses_gpus(config) else {}),
                "volumeMounts": [
                    {"name": "shared", "mountPath": k8s.mount},
                    {"name": "shm", "mountPath": "/dev/shm"},  # 64 MiB otherwise, too little for NCCL
                ],
            }
        ],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": k8s.claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }


def how_to_apply(path: Path) -> str:
    """Return the line with the command that starts the job."""
    return f"start it with `kubectl apply -f {shlex.quote(str(path))}`"
