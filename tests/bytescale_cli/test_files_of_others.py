"""Each file that a command reads may be a named pipe, a device, huge, or nested deeply: one line, and never code 70.

Few combinations have each file and each kind once; the others are slow. tests/test_readers.py tests what they share.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bytescale_cli.main import run
from engine.config.load import load, resolved_yaml
from tests.covering import in_turn

CONFIG = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4},
    **{"num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 258, "rms_norm_eps": 1e-5},
}
WORDS = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}
READ = ("profile-data", "data=folder", "data.path=texts", "data.cache=cache")
BY_KEY = {
    "--config": (("config", "show", "--config", "{}"), 2),
    "recipe": (("config", "show", "recipe={}"), 2),
    "recipes show": (("recipes", "show", "{}"), 2),
    "hostfile": (("plan", "cluster.hostfile={}"), 2),
    "calibration": (("plan", "cluster.calibration={}"), 2),
    "lengths": (("plan", "lengths=file", "lengths.path={}"), 4),
    "tokenizer": ((*READ, "data.tokenizer={}"), 4),
    "weights": (("train", "--dry-run", "run.weights={}"), 4),
}
IN_FOLDER = {
    "config.json": ("train", "--dry-run", "run.weights=model"),
    "model.safetensors": ("train", "--dry-run", "run.weights=model"),
    "model.safetensors.index.json": ("train", "--dry-run", "run.weights=model"),
    "tokenizer_config.json": (*READ, "data.tokenizer=model"),
}
OF_RUN = ("resolved.yaml", "metrics.jsonl", "summary.json", "launches.jsonl", "trace.json", "plan.bin")
BAD = {"pipe": "pipe", "device": "/dev/zero", "huge": "huge", "deep": "deep.yaml", "name": f"./{'x' * 300}"}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with Path("huge").open("wb") as file:
        file.truncate(3 << 30)
    Path("deep.yaml").write_text("[" * 100_000)
    for folder in ("texts", "model", "run/logs"):
        Path(folder).mkdir(parents=True)
    Path("texts/a.txt").write_text("a")
    return tmp_path


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    def check(arguments: tuple[str, ...], *codes: int) -> None:
        found = run([*arguments, "--json"])
        captured = capsys.readouterr()
        answer = json.loads(captured.out)
        assert found in codes, captured.err
        assert answer["ok"] or (answer["error"]["message"] and answer["error"]["hint"])

    return check


@pytest.mark.timeout(60)
@in_turn("key, bad", [*BY_KEY], [*BAD])
def test_a_file_that_a_key_names(key: str, bad: str, refused: Callable[..., None]) -> None:
    command, code = BY_KEY[key]
    if (key, bad) == ("recipes show", "deep"):
        pytest.skip("it shows the text as it is")
    codes = (code, 2) if bad == "name" else (code,)  # a name that is too long names no file
    refused(tuple(word.replace("{}", BAD[bad] if "/" in BAD[bad] else f"./{BAD[bad]}") for word in command), *codes)


@pytest.mark.timeout(60)
@in_turn("name, bad", [*IN_FOLDER], ["pipe", "device", "huge", "deep"])
def test_a_file_in_the_folder_of_a_model(name: str, bad: str, refused: Callable[..., None]) -> None:
    files = {"config.json": CONFIG, "tokenizer.json": WORDS}
    for other, content in files.items():
        Path("model", other).write_text(json.dumps(content))
    Path("model", name).unlink(missing_ok=True)
    Path("model", name).symlink_to(Path(BAD[bad]).absolute())
    refused(IN_FOLDER[name], 4)


@pytest.mark.timeout(60)
@in_turn("name, bad", [*OF_RUN], ["pipe", "device", "huge", "deep"])
def test_a_file_in_the_folder_of_a_run(name: str, bad: str, refused: Callable[..., None]) -> None:
    """The run may be someone else's."""
    Path("run/resolved.yaml").write_text(resolved_yaml(load([])))
    Path("run/metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    if name in ("trace.json", "plan.bin"):
        for other in ("trace.json", "plan.bin"):
            Path("run", other).write_text("{}")
    Path("run", name).unlink(missing_ok=True)
    Path("run", name).symlink_to(Path(BAD[bad]).absolute())
    refused(("report", "run"), 0, 2, 4, 74)
