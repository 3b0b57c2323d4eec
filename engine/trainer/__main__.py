"""`python -m engine.trainer RUN [CHECKPOINT]`: what the launcher starts once a rank."""

import sys

if __name__ == "__main__":  # the planning process imports this module again and must not train
    from engine.trainer.rank import main

    sys.exit(main(sys.argv[1:]))
