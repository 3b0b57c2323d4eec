"""What benchmarks on a GPU need from the planner, computed before and carried, so that nothing is compiled there.

`python benchmarks/gpu/prepared.py` writes it to prepared/, which git ignores. Wheels of packages that the GPU's machine
lacks belong in prepared/wheels: `first_hour.py` installs them from there.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).parents[2]))

from engine.config.schema import Config

FOLDER = Path(__file__).parents[2] / "prepared"

T = TypeVar("T")


def prepared(config: Config, what: str, make: Callable[[], T], write: bool = False) -> T:
    """What was prepared for a config under this name, else what `make` returns. `write` makes and writes it."""
    name = hashlib.sha256(f"{what} {config.model_dump_json()}".encode()).hexdigest()[:16]
    path = FOLDER / f"{name}.pickle"
    if not write and path.exists():
        found: T = pickle.loads(path.read_bytes())  # a file that this program wrote
        return found
    made = make()
    if write:
        FOLDER.mkdir(exist_ok=True)
        path.write_bytes(pickle.dumps(made))
    return made


def main() -> None:
    """Prepare the steps of the parts of first_hour.py's plan of 15 minutes."""
    from benchmarks.gpu import one_rank_1m, train

    for case in (*train.PLANS, *train.TINY):
        train.steps_of(train.config_of(*case), write=True)
    for recipe in one_rank_1m.TRL_S:
        one_rank_1m.modelled_step(recipe, write=True)
    print(f"{len(list(FOLDER.glob('*.pickle')))} files in {FOLDER}")


if __name__ == "__main__":
    main()
