"""`python -m engine.trainer RUN [CHECKPOINT]` is the process of one rank; the launcher starts it."""

import os
import sys

if __name__ == "__main__":  # the planning process also imports this module, and must not train
    from engine.trainer.rank import main

    code = main(sys.argv[1:])
    if code:  # a regular exit would wait for the planning process to finish its plan, and delay the cause
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
