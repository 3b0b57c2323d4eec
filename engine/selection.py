"""Selects among implementations of one operation: the first that is supported, installed, and passes a self-test.

Every optional kernel is selected here: attention, the output head's loss, grouped matrix products of experts, and
pointwise operations.
The selection and its reason are logged. Callers cache the result, so that each is tested and logged once per process.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
_SELECTED = dict[str, str]()  # by operation, in this process


@dataclass(frozen=True)
class Candidate(Generic[T]):
    """One implementation of an operation.

    `load` returns it, and raises ModuleNotFoundError if `package` is not installed. `self_test` runs it and describes a
    wrong result, or returns None. `unsupported` is the reason why it cannot run here, or None.
    """

    name: str
    title: str  # logged as the reason when it is selected
    load: Callable[[], T]
    self_test: Callable[[T], str | None] | None = None
    unsupported: str | None = None
    package: str = "torch"


@dataclass(frozen=True)
class Selected(Generic[T]):
    """The selected implementation, the reason, and why each candidate tried before it was rejected ("name: reason")."""

    name: str
    reason: str
    implementation: T
    rejected: tuple[str, ...]


def select(what: str, candidates: Iterable[Candidate[T]], prefer: str | None = None) -> Selected[T]:
    """Select the first candidate that works; with `prefer`, try only the candidate of that name.

    `what` names the operation in the log. A candidate that is installed but fails is logged as a warning. Raises
    ValueError with all reasons if none works.
    """
    rejected = []
    for candidate in candidates:
        if prefer not in (None, candidate.name):
            continue
        if candidate.unsupported is not None:
            rejected.append(f"{candidate.name}: {candidate.unsupported}")
            continue
        try:
            implementation = candidate.load()
            fault = candidate.self_test(implementation) if candidate.self_test else None
        except _failures() as error:
            # "Not installed" means that the candidate's own package is missing; a missing dependency is a fault.
            if isinstance(error, ModuleNotFoundError) and f"{candidate.package}.".startswith(f"{error.name}."):
                rejected.append(f"{candidate.name}: not installed")
                continue
            fault = first_line(error)
        if fault is None:
            reason = candidate.title if prefer is None else "requested"
            _LOG.info("%s: %s (%s)", what, candidate.name, reason)
            _SELECTED[what] = candidate.name
            return Selected(candidate.name, reason, implementation, tuple(rejected))
        _LOG.warning("%s: %s is installed but broken, so it is not used: %s", what, candidate.name, fault)
        rejected.append(f"{candidate.name}: installed but broken: {fault}")
    raise ValueError(f"no {what}: {'; '.join(rejected) or f'{prefer!r} is not known'}")


def selected() -> dict[str, str]:
    """Return the name of the implementation of each operation that this process has selected so far."""
    return dict(_SELECTED)


def first_line(error: Exception) -> str:
    """Format the type of an exception and the first line of its message."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _failures() -> tuple[type[Exception], ...]:
    """The exception types that third-party kernels raise if they cannot be loaded, compiled or called."""
    # The errors of flash-attn 4's compiler derive directly from Exception.
    compiler = getattr(sys.modules.get("cutlass.base_dsl.common"), "DSLBaseError", RuntimeError)
    broken_code = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
    return ImportError, OSError, RuntimeError, compiler, *broken_code
