"""No source runs a shell, or loads objects that could run code (docs/security.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.root import ROOT

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
