"""Commands that need no GPU import neither torch nor what is slow to import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SMALL = "lengths=github lengths.max=8K batch_tokens=16K context=8K capacity=2K cluster.ranks_per_node=4"


@pytest.mark.long
def test_planning_commands_need_no_torch_and_only_pictures_matplotlib(tmp_path: Path) -> None:
    """One after the other in a process, with the modules that are there after each."""
    lines = [f"plan {SMALL}", f"simulate {SMALL} --no-tuned", f"profile-data {SMALL} --sample 100"]
    lines.append(f"plan {SMALL} --plot {tmp_path / 'a.html'}")
    code = "import sys; from bytescale_cli.main import run\n"
    code += f"for line in {lines}: assert run(line.split()) == 0; print('modules', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *without, last = (set(line.split()) for line in done.stdout.splitlines() if line.startswith("modules "))
    assert len(without) == 3 and not last & {"torch", "deepspeed", "ray"}
    assert "matplotlib" in last and not any("matplotlib" in one for one in without)
