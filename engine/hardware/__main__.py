"""`python -m engine.hardware FOLDER SECONDS`: one rank of `profile-hardware`."""

import sys

if __name__ == "__main__":  # the planning process imports this module again and must not measure
    from pathlib import Path

    from engine.run.folder import RunFolder
    from engine.trainer.rank import run_rank

    def work(folder: RunFolder) -> int:
        from engine.hardware.rank import measure  # inside `run_rank`, which reports a failing import

        return measure(folder, float(sys.argv[2]))

    found = RunFolder(Path(sys.argv[1]))
    sys.exit(run_rank(found, lambda stop: work(found), saves=False))
