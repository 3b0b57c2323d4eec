"""With `python -W error` or PYTHONWARNINGS=error, a library that warns does not end a run: its warnings are shown.

Imported by `engine.errors`, and so by every process of a run: all inherit these options. Tests have filters of their
own.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

if any(option.startswith("e") for option in sys.warnoptions):
    filters: list[Any] = [*warnings.filters]
    for action, message, category, module, line in filters:
        if action == "error":
            texts = [getattr(pattern, "pattern", pattern) or "" for pattern in (message, module)]
            warnings.filterwarnings("default", texts[0], category, texts[1], line)
