"""Ranks open the runtime on Ray without Ray."""

from __future__ import annotations

import subprocess
import sys

from tests.root import ROOT


def test_ranks_do_not_import_ray() -> None:
    """Nor does what the supervisor decides with: only the modules that use Ray do."""
    modules = ["actor", "bridge", "caller", "queue", "ray_blocks", "roles", "slices", "supervisor", "view"]
    code = f"import sys\nfor name in {modules}: __import__(f'engine.remote.{{name}}')\nprint('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "False"
