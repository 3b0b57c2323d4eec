"""No source runs a shell, or loads objects that could run code; runs keep no secrets (docs/security.md)."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(path for folder in ("engine", "bytescale_cli") for path in (ROOT / folder).rglob("*.py"))
# Calls that are never made, and keywords without which others are not.
NEVER = {
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "pty.spawn"),
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads", "shelve.open", "joblib.load", "exec"),
    *(
        "yaml.load",
        "yaml.load_all",
        "yaml.unsafe_load",
        "yaml.full_load",
        "tempfile.mktemp",
        "np.lib.format.open_memmap",
    ),
}
ONLY_WITH = {
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
    "np.lib.format.read_array": ("allow_pickle", False),
}
METHODS_NEVER = {"load_checkpoint"}  # DeepSpeed's unpickles any class
EXPRESSIONS = {"engine/cost/table.py"}  # evaluates expressions of its own, in a namespace of its own


def forbidden(source: str, path: str = "a.py") -> Iterator[str]:
    """Yield the calls of a source that are not allowed."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name, given = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
        if name in ONLY_WITH:
            keyword, value = ONLY_WITH[name]
            wrong = given.get(keyword) != str(value)
        else:
            wrong = (
                name in NEVER
                or name.rpartition(".")[2] in METHODS_NEVER
                or (name == "eval" and path not in EXPRESSIONS)
            )
        if wrong or given.get("shell", "False") != "False":
            yield f"{path}:{node.lineno}: {ast.unparse(node)}"


def test_sources_run_no_shell_and_unpickle_nothing() -> None:
    found = [one for path in SOURCES for one in forbidden(path.read_text(), path.relative_to(ROOT).as_posix())]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "subprocess.run('ls', shell=True)",
        "os.system(a)",
        "pickle.loads(a)",
        "torch.load(a)",
        "torch.load(a, weights_only=False)",
        "np.load(a)",
        "yaml.load(a, Loader=b)",
        "self._engine.load_checkpoint(a)",
        "eval(a)",
    ],
)
def test_the_check_finds(source: str) -> None:
    assert list(forbidden(source))


@pytest.mark.world
def test_a_run_keeps_no_secrets_of_the_environment(tmp_path: Path) -> None:
    """Neither its folder nor its messages have them, whatever ranks and libraries log."""
    for number in range(9):
        (tmp_path / f"{number}.txt").write_text(f"some words {number} " * 40)
    small = ["context=128", "capacity=128", "batch_tokens=512", "model.layers=1", f"data.path={tmp_path}"]
    where = ["data.pattern=*.txt", "run.steps=2", "cluster.ranks_per_node=1", f"run.out={tmp_path / 'run'}"]
    words = [sys.executable, "-m", "bytescale_cli", "train", "recipe=quickstart", *small, *where]
    secrets = {name: f"s3cret-{name}" for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY")}
    done = subprocess.run(words, env=os.environ | secrets, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"resolved.yaml", "summary.json", "report.html", "rank-0.log"} <= {path.name for path in files}
    assert not [path for path in files if b"s3cret" in path.read_bytes()]
    assert "s3cret" not in done.stdout + done.stderr
