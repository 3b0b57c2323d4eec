"""Checks torch, DeepSpeed, GPUs, NCCL and attention kernels, from the answers of libraries.py."""

from __future__ import annotations

import os
import socket

from engine.cluster.gpus import driver_version, visible_gpus
from engine.cluster.nccl import nccl_problem
from engine.config.devices import uses_gpus
from engine.config.schema import Config
from engine.config.units import counted
from engine.doctor import software
from engine.doctor.check import Check, failed, ok, skipped, warning
from engine.doctor.interconnect import not_ready
from engine.doctor.libraries import Libraries
from engine.job import Job
from engine.launch.agents.environment import environment_problem
from engine.launch.checks.launchable import gpu_problem

_FOR_GPUS = "https://pytorch.org/get-started/locally"


def torch(libraries: Libraries) -> Check:
    """Check the version of torch, that it can be imported, and which kind of build it is."""
    answer = libraries["torch"]
    if wrong := software.package("torch"):
        return wrong
    if "error" in answer:
        hint = f"reinstall PyTorch ({_FOR_GPUS}), and try `python -c 'import torch'`"
        return failed("torch", f"cannot be imported: {answer['error']}", hint, software.version("torch"))
    build = f"built for CUDA {answer['cuda']}" if answer["cuda"] else "built for CPUs"
    return ok("torch", f"{answer['version']}, {build}", f"{answer['version']}, {build}")


def deepspeed(libraries: Libraries) -> Check:
    """Check the version of DeepSpeed, and that it can be imported."""
    if wrong := software.package("deepspeed"):
        return wrong
    found = software.version("deepspeed")
    if error := libraries["deepspeed"].get("error"):
        if "error" in libraries["torch"]:
            return skipped("deepspeed", "torch cannot be imported")
        hint = "try `python -c 'import deepspeed'`"
        return failed("deepspeed", f"{found} cannot be imported: {error}", hint, found)
    return ok("deepspeed", f"{found}", found)


def gpus(job: Job, libraries: Libraries) -> Check:
    """Check that the GPUs that the job needs are here, and that torch can use them."""
    config, answer, count = job.config, libraries["gpus"], visible_gpus()
    value = counted(count, "GPU") if count else "none"
    if not_ready():
        return skipped("GPUs", "the driver waits for the fabric manager")
    if problem := gpu_problem(job):
        message = f"{problem.key}: {problem.message}" if problem.key else problem.message
        return failed("GPUs", message, problem.hint or "", value)
    if not count:
        return skipped(
            "GPUs",
            f"no GPUs; cluster={config.cluster.name} trains on CPUs"
            if not uses_gpus(config)
            else "no rank of this cluster runs on this machine",
        )
    if "error" in answer:
        return skipped("GPUs", "torch cannot be imported")
    if answer["why"]:
        hint = f"install a PyTorch with CUDA that fits the driver: {_FOR_GPUS}"
        message = f"there are {count}, but PyTorch cannot use them: {answer['why']}"
        return (failed if uses_gpus(config) else warning)("GPUs", message, hint, value)
    names = answer["names"]
    kinds = ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names)))
    idle = "" if uses_gpus(config) else f"; cluster={config.cluster.name} trains on CPUs"
    return ok("GPUs", f"{kinds}{idle}", kinds)


def driver() -> Check:
    """Show which CUDA the driver supports. Whether torch can work with it, `gpus` says."""
    found = driver_version()
    if found is None:
        return skipped("CUDA driver", "not found, or it does not work")
    return ok("CUDA driver", f"supports CUDA {found}", f"CUDA {found}")


def nccl(job: Job, libraries: Libraries) -> Check:
    """Check that torch has NCCL, and that it keeps the order of kernels if the job needs it to."""
    config, answer = job.config, libraries["nccl"]
    if "error" in answer:
        return skipped("NCCL", "torch cannot be imported")
    found = answer["version"]
    if not visible_gpus() and not uses_gpus(config):
        return skipped("NCCL", f"cluster={config.cluster.name} trains on CPUs, with gloo")
    if found is None:
        return failed(
            "NCCL", "this PyTorch was built without it", f"install a PyTorch with CUDA: {_FOR_GPUS}", "missing"
        )
    text = ".".join(map(str, found))
    if problem := nccl_problem(config, job.cluster.ranks, found, socket.gethostname()):
        return failed("NCCL", problem.message, problem.hint or "", text)
    return ok("NCCL", text, text)


def environment(config: Config) -> Check:
    """Check for variables that make runs on GPUs slow."""
    if problem := environment_problem(config, os.environ):
        return failed("environment", f"{problem.key} {problem.message}", problem.hint or "", problem.key)
    return ok("environment", "no variable is set that would slow ranks down")


def kernel(libraries: Libraries) -> Check:
    """Show which attention kernel ranks would use here, why, and why not those before it."""
    answer = libraries["kernel"]
    if "error" in answer:
        if "error" in libraries["torch"]:
            return skipped("attention kernel", "torch cannot be imported")
        hint = "the first line of the error is above; `python -m engine.doctor.libraries` runs the test"
        return failed("attention kernel", f"none could be tested: {answer['error']}", hint)
    broken = [reason for reason in answer["rejected"] if "installed but broken" in reason]
    message = f"{answer['name']} for {answer['dtype']}: {answer['reason']}"
    # On a CPU all but the first and the last are for GPUs, which says nothing.
    refused = [reason for reason in answer["rejected"] if not reason.endswith("only")]
    if refused:
        message += f" (not used: {'; '.join(refused)})"
    if broken:
        return warning("attention kernel", message, "reinstall the broken package, or remove it", answer["name"])
    if answer["name"] == "reference":
        hint = "use dtype=bf16 and a head size that is a multiple of 8; docs/gpu.md lists what kernels support"
        return warning("attention kernel", f"{message}; it is slow, and stores all scores", hint, answer["name"])
    return ok("attention kernel", message, answer["name"])
