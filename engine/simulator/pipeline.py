"""TODO"""
from typing import Any
def run_stages(plan: Any, gangs: Any) -> Any:
    raise NotImplementedError
