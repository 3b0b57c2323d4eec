"""What pyproject.toml must say so that tests and runs work on a machine with GPUs."""

from __future__ import annotations

import importlib
import os
import re
import warnings
from collections.abc import Iterator
from importlib import metadata

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import conftest
from tests.root import ROOT

TEXT = (ROOT / "pyproject.toml").read_text()


def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


@pytest.mark.long
@pytest.mark.parametrize("name", ["torch._inductor.compile_fx", "torch._inductor.fx_passes.fuse_attention"])
def test_advice_of_torch_compile_on_gpus_is_no_failure(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile warns on each GPU since Ampere where fp32 products are not TF32, and warnings are errors here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch uses torch.jit, which it calls deprecated
        module = importlib.import_module(name)
    hopper(monkeypatch)
    warn = module._warn_tf32_disabled.__wrapped__  # without its cache: it warns once per process
    warn()
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        warn()
    assert len(raised) == 1, "the stand-in does not reach the warning, so nothing was tested"


def test_other_warnings_are_failures() -> None:
    with pytest.raises(UserWarning, match="something else"):
        warnings.warn("something else", stacklevel=1)


def requirements(extra: str) -> Iterator[Requirement]:
    """The packages of an extra, and of the extras that it names."""
    tomllib = pytest.importorskip("tomllib")  # not in Python 3.10
    for one in map(Requirement, tomllib.loads(TEXT)["project"]["optional-dependencies"][extra]):
        if one.name == "bytescale":
            for other in one.extras:
                yield from requirements(other)
        else:
            yield one


def pins() -> dict[str, str]:
    """The version of each package that constraints.txt pins."""
    lines = (line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines())
    return {canonicalize_name(name): version for name, version in lines}


def least(package: str) -> tuple[int, ...]:
    """The least version of a package that pyproject.toml allows."""
    found = re.search(rf'"{package}>=([0-9.]+)', TEXT)
    assert found is not None
    return tuple(map(int, found[1].split(".")))


def test_pytest_knows_all_options() -> None:
    """pytest 8 stops at faulthandler_exit_on_timeout."""
    assert "faulthandler_exit_on_timeout" in TEXT and least("pytest") >= (9, 0)


@pytest.mark.parametrize(
    ("chosen", "visible"),
    [("not slow and not gpu", ""), ("", ""), ("slow", ""), ("gpu", "0"), ("gpu and not slow", "0")],
)
def test_gpus_are_hidden_from_tests_that_do_not_ask_for_them(
    chosen: str, visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed takes any GPU that it sees: two ranks of a test would take cuda:0, and a cuda:1 that is not there."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    conftest.hide_gpus(chosen)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible


def test_constraints_are_within_the_ranges_of_all_extras_of_contributors() -> None:
    installed, pinned = list(requirements("dev")), pins()
    assert {one.name for one in installed} >= {"ray", "pyarrow", "transformers", "pytest"}
    assert [str(one) for one in installed if not one.specifier.contains(pinned[canonicalize_name(one.name)])] == []


def test_constraints_pin_all_that_ray_needs() -> None:
    """What nothing pins would be another version on each day that `make install` runs."""
    seen, ahead = set[str](), ["ray"]
    while ahead:
        name = canonicalize_name(ahead.pop())
        if name not in seen:
            seen.add(name)
            needs = map(Requirement, metadata.requires(name) or [])
            ahead += [one.name for one in needs if one.marker is None or one.marker.evaluate({"extra": ""})]
    assert seen - pins().keys() == set()
