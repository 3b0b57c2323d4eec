from __future__ import annotations

import ast
import os
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core.caching import IndexDataCacheFile
from numba.core.errors import NumbaError

from engine import compiled
from engine.compiled import njit_in_place
from engine.errors import StorageError
from engine.units import Ints

REPORTS = """
from engine.compiled import when_compiling
when_compiling(lambda: print("compiles"))
from engine.planner.make import plan_step
from tests.planner.samples import ints, settings
plan_step(ints(3, 4), settings("naive"))
plan_step(ints(3, 40), settings("naive"))
"""


def test_code_of_other_types_that_is_saved_at_once_has_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else later processes would run the machine code of other types: the cache is shared by all ranks of a host."""
    read = IndexDataCacheFile._load_index

    def slowly(cache: Any) -> Any:
        found = read(cache)
        time.sleep(0.1)
        return found

    monkeypatch.setattr(IndexDataCacheFile, "_load_index", slowly)
    caches = [IndexDataCacheFile(str(tmp_path), "function", "stamp") for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda cache, types: cache.save(types, types), caches, "abc"))
    assert [caches[0].load(types) for types in "abc"] == ["a", "b", "c"]


def test_functions_in_place_call_none_of_numpy() -> None:
    """Else whether they compile depends on what the process has compiled before, and what it found in the cache."""
    found = list[str]()
    for path in sorted(compiled._ENGINE.rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and "njit_in_place" in map(ast.unparse, function.decorator_list):
                calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
                called = (ast.unparse(node.func) for node in calls if isinstance(node.func, ast.Attribute))
                found += (f"{path.name}: {function.name}: {name}" for name in called)
    assert not found


SOURCES = ("cost/times.py", "planner/plan/emit.py", *compiled._MODULES)


@pytest.mark.parametrize("changed", SOURCES)
def test_a_change_of_any_source_leads_to_another_folder(changed: str, tmp_path: Path) -> None:
    """Also of a source that other files' compiled functions only call, and of constants frozen into them."""
    for name in SOURCES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a")
    before = compiled._digest(tmp_path)
    assert compiled._digest(tmp_path) == before
    (tmp_path / changed).write_text("b")
    assert compiled._digest(tmp_path) != before


def test_a_folder_that_cannot_be_written_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = compiled._folder([tmp_path / "file", tmp_path / "free"])
    assert folder.parent == tmp_path / "free"
    assert folder.is_dir()


def test_a_folder_below_a_shared_one_is_used_only_if_no_other_user_can_write_to_it(tmp_path: Path) -> None:
    """numba unpickles what it finds: in /tmp, another user may have made the folder first."""
    shared, free = tmp_path / "tmp", tmp_path / "free"
    shared.mkdir()
    shared.chmod(0o1777)
    others, linked, open_to_all = shared / "others", shared / "linked", shared / "open"
    others.mkdir()
    if os.getuid() == 0:
        os.chown(others, 12345, 12345)
    else:
        others.chmod(0o777)
    linked.symlink_to(tmp_path)
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    assert compiled._folder([others, linked, open_to_all, free]).parent == free
    mine = compiled._folder([shared / "mine", free])
    assert mine.parent == shared / "mine"
    assert compiled._folder([shared]).parent == shared, "it makes a folder of its own there"
    with pytest.raises(StorageError, match=r"no folder for compiled code can be used, of .*others"):
        compiled._folder([others])


def test_a_group_is_other_users_too(tmp_path: Path) -> None:
    """With a umask of 002, folders of users are writable by their group, whose members could put code there."""
    group, free = tmp_path / "group", tmp_path / "free"
    group.mkdir()
    group.chmod(0o775)
    before = os.umask(0o002)
    try:
        assert compiled._folder([group, group / "mine", free]).parent == free, "anyone in the group may replace it"
        assert stat.S_IMODE(free.stat().st_mode) == 0o700
        group.chmod(0o1775)
        assert compiled._folder([group / "own", free]).parent == group / "own", "others cannot rename it"
    finally:
        os.umask(before)


def test_the_digest_covers_all_compiled_functions(pytestconfig: pytest.Config) -> None:
    engine = pytestconfig.rootpath / "engine"
    sources = {file: file.read_text() for file in engine.rglob("*.py")}
    holding = {file.relative_to(engine) for file, text in sources.items() if "\n@njit" in text}
    packages = {file.parts[0] for file in holding if str(file) not in compiled._MODULES}
    assert packages == set(compiled._PACKAGES) and {*map(Path, compiled._MODULES[2:])} <= holding
    assert not [file for file, text in sources.items() if "from numba import njit" in text], "not cached by the digest"


@pytest.mark.long
def test_compiling_is_reported_once_and_only_where_it_happens(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    for reported in ("compiles\n", ""):
        run = subprocess.run(
            [sys.executable, "-c", REPORTS],
            cwd=pytestconfig.rootpath,
            env={"PATH": "", "NUMBA_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout == reported


def test_a_function_without_reference_counts_cannot_allocate() -> None:
    def doubled(values: Ints) -> Ints:
        return values * 2

    with pytest.raises((NumbaError, RuntimeError)):
        njit_in_place(doubled)(np.ones(3, dtype=np.int64))
