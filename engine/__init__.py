"""ByteScale."""

import sys
import warnings
from typing import Any

# With `python -W error` or PYTHONWARNINGS=error, any library that warns would end a run, also one that only some rank
# imports. Warnings are then shown. Tests have their own filters, which keep them errors.
if any(option.startswith("e") for option in sys.warnoptions):
    filters: list[Any] = [*warnings.filters]
    for action, message, category, module, line in filters:
        if action == "error":
            texts = [getattr(pattern, "pattern", pattern) or "" for pattern in (message, module)]
            warnings.filterwarnings("default", texts[0], category, texts[1], line)
