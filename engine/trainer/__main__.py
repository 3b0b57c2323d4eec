"""`python -m engine.trainer RUN [CHECKPOINT]` is the process of one rank; the launcher starts it."""

import sys

if __name__ == "__main__":  # the planning process also imports this module, and must not train
    from engine.trainer.rank import leave, main

    leave(main(sys.argv[1:]))
