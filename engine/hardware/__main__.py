"""`python -m engine.hardware FOLDER SECONDS`: what `profile-hardware` starts once a rank."""

import sys

if __name__ == "__main__":  # the planning process imports this module again and must not measure
    from pathlib import Path

    from engine.trainer.folder import RunFolder
    from engine.trainer.rank import run_rank

    def work(folder: RunFolder) -> int:
        """Measure in a folder; imported here, so that a failing import is told too."""
        from engine.hardware.rank import measure

        return measure(folder, float(sys.argv[2]))

    found = RunFolder(Path(sys.argv[1]))
    sys.exit(run_rank(found, lambda stop: work(found), saves=False))
