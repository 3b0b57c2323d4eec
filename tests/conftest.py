"""Settings that all tests share."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import accepted, tiers
from tests.composed import FOLDER, kept

# A machine that is busy with something else is no error.
# `--hypothesis-profile thorough` draws many more examples in tests that do not say how many.
QUICK = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=50)
settings.register_profile("bytescale", QUICK)
settings.register_profile("thorough", QUICK, max_examples=1000)
settings.load_profile("bytescale")

BEGAN_S = pytest.StashKey[float]()  # the processor seconds of this process when a test began


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept", action="store_true", help="rewrite golden files and answers to mistakes")


def pytest_configure(config: pytest.Config) -> None:
    """Hide the machine's GPUs from all tests but those marked gpu, and check and compose the same overrides once."""
    hide_gpus(config.getoption("markexpr"))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for commands in the background
    keep_compositions(config)
    accepted.REWRITE = config.getoption("accept")


def hide_gpus(chosen: str) -> None:
    """Hide the machine's GPUs, unless the marks that were chosen (`pytest -m`) name gpu.

    PyTorch and DeepSpeed choose a GPU wherever they see one. Both read this variable when they first look.
    """
    if "gpu" not in chosen.replace("not gpu", ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def keep_compositions(config: pytest.Config) -> None:
    """Replace `compose` and `check` by those that keep results, before test modules load configs at their import.

    The processes of pytest-xdist inherit the folder's name, and each collects all tests.
    """
    if FOLDER not in os.environ:
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="bytescale-tests-")
        config.add_cleanup(partial(shutil.rmtree, os.environ[FOLDER]))
    for module, name, function in kept(Path(os.environ[FOLDER])):
        setattr(module, name, function)


@pytest.fixture(scope="session", autouse=True)
def token_cache() -> Iterator[None]:
    """Keep token files of tests, and of processes that they start, out of the user's cache folder.

    The processes of pytest-xdist share them: packing the standard library takes 8 to 20 s.
    """
    users, ours = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"), Path(os.environ[FOLDER]) / "cache"
    (users / "matplotlib").mkdir(parents=True, exist_ok=True)  # slow to make again
    ours.mkdir(exist_ok=True)
    with suppress(FileExistsError):
        (ours / "matplotlib").symlink_to(users / "matplotlib")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(ours))
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disable garbage collection while tests are collected, where it takes a quarter of the processor time.

    Then exclude from collections what exists for the whole session, the libraries' objects and the tests. Collect new
    objects less often than by default, which took 6 % of the processor time of tests of configs, costs and pages.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Note which test begins, and when."""
    tiers.running = item
    item.stash[BEGAN_S] = tiers.processor_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note what a test has taken so far. pytest-xdist passes the attributes of reports on."""
    report = yield
    report.processor_s = tiers.processor_seconds() - item.stash[BEGAN_S]
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what all tests took and which may need the mark `long`, where those are left out, as in `make check`."""
    if "not long" in config.getoption("markexpr"):
        for line in tiers.summary(chain.from_iterable(terminalreporter.stats.values())):
            terminalreporter.write_line(line)
