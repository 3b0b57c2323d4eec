"""`python -m tests.recipes.accept` writes every recipe's golden text anew; what changed shows as a diff."""

from __future__ import annotations

from pathlib import Path

from engine.config import tree
from engine.config.load import load, resolved_yaml

GOLDEN = Path(__file__).parent / "golden"


def accept() -> None:
    for old in GOLDEN.iterdir():
        old.unlink()
    for name in tree.recipes():
        (GOLDEN / f"{name}.yaml").write_text(resolved_yaml(load([f"recipe={name}"])), encoding="utf-8")


if __name__ == "__main__":
    accept()
