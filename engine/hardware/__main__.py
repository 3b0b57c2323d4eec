"""One rank of `profile-hardware`.

`python -m engine.hardware machine FOLDER SECONDS` measures this machine, and `python -m engine.hardware network FOLDER
RANKS` the network between two nodes, the first of which has RANKS ranks.
"""

import sys

if __name__ == "__main__":  # the planning process imports this module again and must not measure
    from pathlib import Path

    from engine.control.control import Control
    from engine.run.folder import RunFolder
    from engine.trainer.rank import importing, leave, run_rank

    def work(folder: RunFolder, control: Control) -> int:
        # Imported inside `run_rank`, which reports a failing import.
        if sys.argv[1] == "network":
            from engine.hardware import network

            return network.measure(folder, int(sys.argv[3]), control)
        with importing():
            from engine.hardware import rank

        return rank.measure(folder, float(sys.argv[3]), control)

    found = RunFolder(Path(sys.argv[2]))
    leave(run_rank(found, lambda stop, control: work(found, control), saves=False))
