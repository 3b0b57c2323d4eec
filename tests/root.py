"""The folder of the project, for tests that read its files or start a program that imports `tests`."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
