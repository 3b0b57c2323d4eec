"""Compares plans before and after a change that must not alter any plan, by their digests.

`python benchmarks/plan_digests.py write FILE` plans one step of each recipe from each length mix with two seeds and
writes the digests as JSON. `python benchmarks/plan_digests.py compare FILE` plans them again, prints each difference,
and exits with 1 if there is one. A plan that is refused is recorded as its error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from engine.config import tree
from engine.config.load import load
from engine.data.lengths import step_lengths
from engine.errors import BytescaleError
from engine.job import Job
from engine.planner.make import plan_step

MIXES = ("github", "byted", "lognormal")
SEEDS = (0, 1)


def digests() -> dict[str, str]:
    """Return the digest of each case's first step, or its error, by `recipe mix seed`."""
    found = {}
    for recipe in tree.recipes():
        for mix in MIXES:
            for seed in SEEDS:
                case = f"{recipe} {mix} {seed}"
                try:
                    config = load([f"recipe={recipe}", f"lengths={mix}", f"run.seed={seed}"])
                    lengths = next(iter(step_lengths(config, 1)))
                    found[case] = plan_step(lengths, Job(config).settings).digest
                except BytescaleError as error:
                    found[case] = f"{type(error).__name__}: {error}"
    return found


def main(command: str, path: Path) -> int:
    """Write the digests, or compare them with those that were written; return the exit code."""
    found = digests()
    if command == "write":
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{len(found)} digests")
        return 0
    before = json.loads(path.read_text())
    changed = [case for case in before | found if before.get(case) != found.get(case)]
    for case in changed:
        print(f"{case}: {before.get(case)} -> {found.get(case)}")
    print(f"{len(before)} before, {len(found)} now, {len(changed)} changed")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
