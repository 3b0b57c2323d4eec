"""Checks versions: of Python, of ByteScale's own sources, and of the packages that it needs. Imports none of them."""

from __future__ import annotations

import hashlib
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from engine.config.schema import Data
from engine.doctor.check import Check, failed, ok, skipped, warning
from engine.remote.checks import version_problem
from engine.remote.probe import cluster_problem

_HOME = Path(__file__).parents[2]
_OURS = ("bytescale_cli", "engine", "recipes")
_INSTALL = "install ByteScale again in this environment: `pip install .` in the folder of its sources"


@dataclass(frozen=True)
class Software:
    """What must be the same on all hosts: every node computes plans itself, and ranks exchange tensors."""

    python: str
    code: str  # a digest of our sources and recipes
    packages: dict[str, str | None]  # the version of each required package; None if it is not installed

    @classmethod
    def here(cls, *extras: str) -> Software:
        """Return that of this process, with the packages `extras` that the config needs too."""
        digest = hashlib.blake2b(digest_size=6)
        for path in sorted(path for name in _OURS for path in (_HOME / name).rglob("*") if path.suffix in _SOURCES):
            digest.update(str(path.relative_to(_HOME)).encode() + b"\0" + path.read_bytes())
        return cls(
            platform.python_version(),
            digest.hexdigest(),
            {name: version(name) for name in sorted({*required(), *extras})},
        )


_SOURCES = (".py", ".yaml")


def version(package: str) -> str | None:
    """Return the version of an installed package; None if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def required() -> dict[str, SpecifierSet]:
    """Return the range of each package that ByteScale needs; none if it runs from sources without being installed."""
    try:
        lines = metadata.requires("bytescale") or []
    except metadata.PackageNotFoundError:
        return {}
    needs = map(Requirement, lines)
    return {one.name: one.specifier for one in needs if one.marker is None or one.marker.evaluate({"extra": ""})}


def bytescale(ours: Software) -> Check:
    """Check which ByteScale this is, and whether it is installed."""
    installed = version("bytescale")
    if installed is None:
        message = f"its sources ({ours.code}) are not installed, so the versions of packages that they need are unknown"
        return warning("bytescale", message, _INSTALL, f"not installed, sources {ours.code}")
    return ok("bytescale", f"{installed}, sources {ours.code}", f"{installed}, sources {ours.code}")


def python() -> Check:
    """Check the version of Python."""
    found = platform.python_version()
    try:
        allowed = SpecifierSet(metadata.metadata("bytescale")["Requires-Python"] or "")
    except metadata.PackageNotFoundError:
        return ok("python", found, found)
    if not allowed.contains(found, prereleases=True):
        return failed(
            "python", f"is {found}, but {allowed} is needed", f"make an environment with Python {allowed}", found
        )
    return ok("python", found, found)


def package(name: str) -> Check | None:
    """Return the failed check of a package that is missing, or not in the range that ByteScale needs; else None."""
    found, allowed = version(name), required().get(name, SpecifierSet())
    if found is None:
        return failed(name, "is not installed", _INSTALL, "missing")
    if not allowed.contains(found, prereleases=True):
        return failed(name, f"is {found}, but {name}{allowed} is needed", f"pip install '{name}{allowed}'", found)
    return None


def packages() -> Check:
    """Check all other packages that ByteScale needs."""
    others = [name for name in required() if name not in ("torch", "deepspeed")]
    if not others:
        return skipped("packages", "ByteScale is not installed, so the packages that it needs are unknown")
    wrong = [check for check in map(package, others) if check is not None]
    if wrong:
        message = "; ".join(f"{check.name} {check.message}" for check in wrong)
        found = ", ".join(f"{check.name} {check.value}" for check in wrong)
        return failed("packages", message, wrong[0].hint or "", found)
    return ok("packages", f"{len(others)} others are in the ranges that ByteScale needs", f"{len(others)} in range")


def ray(data: Data, hosts: int) -> Check:
    """Check that Ray is installed if the config uses it, and that the cluster which the config names can be used."""
    if data.runtime != "ray":
        return skipped("Ray", "data.runtime is not ray")
    address = data.ray.address
    problem = version_problem() if address is None else cluster_problem(address, hosts)
    if problem is not None:
        return failed("Ray", problem.message, problem.hint or "", version("ray") or "missing")
    return ok("Ray", f"{version('ray')}", version("ray"))


def extras(data: Data) -> list[str]:
    """Return the packages besides the required ones that must be the same on all hosts."""
    return ["ray"] if data.runtime == "ray" else []
