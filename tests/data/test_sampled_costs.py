"""What `profile-data --cost` measures of a sample."""

from __future__ import annotations

import json
import random
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from statistics import median

import pytest

from engine.config import schema
from engine.config.load import load
from engine.config.schema import Config
from engine.config.sources import source_configs
from engine.data.blocks.work import Cost, joined_costs
from engine.data.opening import list_blocks
from engine.data.overview import Corpora
from engine.data.runtime.local import NodePlanner
from engine.data.sampled_costs import sampled_costs
from engine.data.steps import Cursor
from engine.errors import DataError
from engine.job import Job
from engine.launch.prepare import write_facts
from engine.run.folder import RunFolder
from tests.data.tokenizers.chat_folder import CHATML_MARKED, chat_folder, python_texts

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


@pytest.mark.slow
def test_a_run_needs_as_much_processor_time_as_was_predicted(tmp_path: Path) -> None:
    """Of loaders, in seconds a byte, within 20 %: the median of five runs.

    Predictions are measured while a run is: other processes on the same cores and caches change the processor time of
    the same work by half and more.
    """
    names, ratios = ("texts", "words", "chats"), defaultdict[str, list[float]](list)
    write_documents(tmp_path)
    for number in range(5):
        folder = RunFolder(tmp_path / f"run-{number}")
        folder.root.mkdir()
        config = load(
            [
                *("recipe=quickstart", "data=jsonl", f"data.cache={folder.root / 'cache'}", "data.loaders=1"),
                *(f"data.tokenizer={tmp_path / 'tokenizer'}", "model.vocab=512", "data.sources.chats.field=messages"),
                *(f"data.sources.{name}.path={tmp_path / name}.jsonl" for name in names),
                *("data.mix={texts: 1, words: 1, chats: 1}", "data.validation_share=0"),
                *("context=64K", "capacity=64K", "batch_tokens=1M"),
            ]
        )
        found, predicted = measured_and_predicted(folder, config)
        for name in names:
            ratios[name].append(found[name].seconds / found[name].bytes)
            ratios[name][-1] /= predicted[name].seconds / predicted[name].bytes
    assert {name: median(some) for name, some in ratios.items()} == pytest.approx(dict.fromkeys(names, 1), rel=0.2), (
        ratios
    )


def write_documents(folder: Path) -> None:
    """Write three sources of 5 MiB, whose documents have other sizes, and a tokenizer."""
    chat_folder(folder / "tokenizer", CHATML_MARKED)
    drawn, texts = random.Random(0), python_texts(40)
    words = [word for text in texts for word in text.split()]

    def some(count: int) -> str:
        return " ".join(drawn.choices(words, k=count))

    rows: dict[str, Callable[[], object]] = {
        "texts": lambda: {"text": drawn.choice(texts)},
        "words": lambda: {"text": some(100)},
        "chats": lambda: {
            "messages": [{"role": role, "content": some(40)} for _ in range(3) for role in ("user", "assistant")]
        },
    }
    for name, row in rows.items():
        with (folder / f"{name}.jsonl").open("w") as file:
            while file.tell() < 5 << 20:
                file.write(json.dumps(row()) + "\n")


def measured_and_predicted(folder: RunFolder, config: Config) -> tuple[dict[str, Cost], dict[str, Cost]]:
    """Plan steps of a run until its loader has packed nearly all blocks. Return the costs of each source."""
    sources, found, ended = source_configs(config.data), dict[str, Cost](), threading.Event()

    def predict(name: str) -> Cost:
        total, seed = Cost(), 0
        while not ended.is_set():
            total, seed = total.plus(sampled_costs({name: sources[name]}, seed)[name]), seed + 1
        return total

    corpora = Corpora(config)
    corpora.are_few = False  # else it would pack them
    write_facts(folder, config, corpora, 0)
    blocks, cursor = sum(map(len, list_blocks(config.data).values())), Cursor()
    with ThreadPoolExecutor(len(sources)) as beside, closing(NodePlanner.of(folder, Job(config), 0)) as planner:
        predicting = {name: beside.submit(predict, name) for name in sources}
        while sum(cost.blocks for cost in found.values()) < blocks - len(sources):
            sent, _ = planner.step(cursor)
            found, cursor = joined_costs(found, sent.packed), sent.after
        ended.set()
    return found, {name: answer.result() for name, answer in predicting.items()}
