"""What the launcher calls to talk to the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Say = Callable[[str], None]  # with a message, of one line
OnStep = Callable[[Mapping[str, Any]], None]  # with the metrics of a step
