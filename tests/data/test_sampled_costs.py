"""What `profile-data --cost` measures of a sample."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.config import schema
from engine.data.sampled_costs import sampled_costs
from engine.errors import DataError

MakeData = Callable[..., schema.Data]


def test_each_source_has_its_cost(tmp_path: Path, make_data: MakeData) -> None:
    data = make_data(tmp_path / "few.jsonl", format="jsonl")
    (tmp_path / "few.jsonl").write_text('{"text": "one"}\n{"text": "four"}\n')
    tokens = data.model_copy(update={"format": "tokens"})
    before, done = set(tmp_path.iterdir()), list[float]()
    found = sampled_costs({"few": data, "packed": tokens}, 1, done.append)
    assert found.keys() == {"few"} and found["few"][:2] == (1, 2) and done == [0.5, 1.0]
    assert found["few"].seconds > 0 and found["few"].memory > 10 << 20
    assert set(tmp_path.iterdir()) == before, "nothing is left"
    (tmp_path / "few.jsonl").write_text('{"text": "one"}\n{"text": 4}\n')
    with pytest.raises(DataError):
        sampled_costs({"few": data}, 1)
