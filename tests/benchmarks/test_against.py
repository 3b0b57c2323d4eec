"""The comparison of two commits: worktrees, ratios, and a comparison of this checkout with itself."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import against
from tests.benchmarks.rows import measured

pytestmark = pytest.mark.long


def test_a_worktree_is_of_the_commit_and_goes_away(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    for text in ("then", "now"):
        (tmp_path / "file").write_text(text)
        subprocess.run([*git, "add", "file"], check=True)
        subprocess.run([*git, "commit", "--quiet", "-m", text], check=True)
    with against.checkout("HEAD~1", tmp_path) as tree:
        assert (tree / "file").read_text() == "then"
    assert not tree.exists()
    assert len(subprocess.run([*git, "worktree", "list"], check=True, capture_output=True).stdout.splitlines()) == 1


def test_the_least_time_of_all_turns_counts_and_the_first_turn_does_not() -> None:
    times = iter([0.1, 0.1, 5.0, 3.0, 4.0, 2.0])
    seen = []

    def measure(tree: Path) -> float:
        seen.append(tree.name)
        return next(times)

    assert against.alternate((Path("then"), Path("now")), measure, 2) == ([5.0, 4.0], [3.0, 2.0])
    assert seen == ["then", "now"] * 3


def test_a_slow_run_of_one_step_makes_the_others_no_faster() -> None:
    """Its time is subtracted: the turn with the least difference would count."""
    assert against.step([(4.0, 20.0, 1000), (9.0, 21.0, 1000)]) == 16_000


def test_rows_of_planning_are_means_over_seeds_of_the_least_times() -> None:
    def turn(*ms: float) -> dict[str, list[dict[str, float]]]:
        return {"github": [{"ms": of, "balance": 0.9, "over_bound": 1.1, "makespan_s": 2.0} for of in ms]}

    (row,) = against.planning_rows("8/64", [turn(4.0, 7.0), turn(5.0, 6.0)], [turn(1.0, 2.0), turn(3.0, 1.0)])
    assert (row["then"], row["now"], row["ratio"]) == (5.0, 1.0, 0.2)
    assert (row["balance_now"], row["over_bound_then"], row["makespan_s_now"]) == (0.9, 1.1, 2.0)


def test_a_checkout_beside_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def here(commit: str) -> Iterator[Path]:
        assert commit == "HEAD"
        yield Path(against.__file__).parent.parent

    monkeypatch.setattr(against, "checkout", here)
    *plans, help_ = measured(against, "HEAD", "planning", "help", "--sizes", "8/16", "--turns", "1")["rows"]
    assert [plan["measure"] for plan in plans] == [f"planning 8/16 {of}, ms" for of in ("lognormal", "github", "byted")]
    for row in (*plans, help_):
        assert row["then"] > 0 and row["now"] > 0 and row["ratio"] == row["now"] / row["then"]
    assert all(plan["balance_then"] == plan["balance_now"] for plan in plans)
