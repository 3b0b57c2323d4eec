"""The text that `generate` writes is that of the trained model: transformers chooses the same tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.config.load import resolved_yaml
from engine.data.tokenizers.load import open_tokenizer
from engine.errors import BytescaleError, CheckpointError, ConfigError, DataError
from engine.models.build import build_model
from engine.models.common.attention import LocalAttention
from engine.models.common.initialise import initialise
from engine.run import checkpoints
from engine.run.checkpoints import TrainState
from engine.run.compatibility import must_match
from engine.run.folder import RunFolder
from engine.trainer import generate as module
from engine.trainer.export import export_weights
from engine.trainer.generate import Language, continued, generate
from engine.trainer.optimizer import build_optimizer
from engine.zero.engine import ZeroEngine
from tests.data.tokenizers.chat_folder import chat_folder
from tests.refusals import refused
from tests.run.damage import TOKEN, alone
from tests.weights.folders import config, llama, mixtral, saved
from tests.world import run_world

PROMPT = "def main():"
IDS = [256, *PROMPT.encode()]


def theirs(model: PreTrainedModel, prompt: list[int], tokens: int) -> list[int]:
    """What transformers generates greedily after a prompt, without EOS."""
    found = model.generate(
        torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, eos_token_id=257, pad_token_id=0
    )
    return [token for token in found[0, len(prompt) :].tolist() if token != 257]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaMA of transformers with a context of 64 tokens, without a tokenizer."""
    return saved(llama(max_position_embeddings=64), tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("model", [llama(), llama(tie_word_embeddings=True), llama(torch.bfloat16), mixtral()])
@pytest.mark.parametrize("piece", [4, 512])
def test_greedy_tokens_are_those_of_transformers(
    model: PreTrainedModel, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE", piece)
    found = generate(saved(model, tmp_path), PROMPT, 40, 0.0, 0, "bytes")
    assert found["tokens"] == theirs(model, IDS, 40)
    assert len(set(found["tokens"])) > 5, "a model that repeats itself would prove little"
    assert found["text"] == bytes(token for token in found["tokens"] if token < 256).decode("utf-8", "replace")
    assert (found["prompt_tokens"], found["step"]) == (len(IDS), None)


def train_and_save(root: Path) -> None:
    """On a rank: one update of a model in fp32, and its checkpoint."""
    made = config("dtype=fp32", "model.rope_theta=5e5")
    model = build_model(made)
    initialise(model, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 10  # from 0.02: else all logits are about equal
    engine = ZeroEngine(model, build_optimizer(model, made.optimizer), made)
    positions, tokens = torch.arange(37), torch.randint(0, 258, (37,), generator=torch.Generator().manual_seed(1))
    engine.backward(engine.forward(tokens, positions, tokens, LocalAttention(positions)), 37)
    engine.step(1e-2)
    run = RunFolder(root)
    state = TrainState(1, {}, 1, {"data": "f"}, must_match(made))
    checkpoints.write(run.checkpoints, state, 0, engine.snapshot().write_each, TOKEN, alone)
    run.resolved.write_text(resolved_yaml(made))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank with a checkpoint."""
    root = tmp_path_factory.mktemp("trained") / "run"
    run_world(1, train_and_save, root)
    return root


@pytest.mark.world
def test_a_run_continues_as_its_export_does(trained: Path, tmp_path: Path) -> None:
    said: list[str] = []
    found = generate(trained, PROMPT, 40, 0.0, 0, say=said.append)
    export_weights(trained, tmp_path / "hf", None, 1 << 30)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert found["tokens"] == theirs(model, IDS, 40) and len(set(found["tokens"])) > 5
    assert generate(tmp_path / "hf", PROMPT, 40, 0.0, 0, "bytes")["tokens"] == found["tokens"]
    (checkpoint,) = checkpoints.newest_first(trained / "checkpoints")
    assert (found["source"], found["step"]) == (str(checkpoint), 1)
    assert generate(checkpoint, PROMPT, 40, 0.0, 0)["text"] == found["text"]
    (line,) = said
    assert line.startswith(f"the model is a toy of {found['parameters']:,} parameters") and "recipes list" in line


@pytest.mark.world
def test_a_run_on_tokens_of_another_tokenizer_says_which(trained: Path, tmp_path: Path) -> None:
    """Its config has data.tokenizer=bytes, because it names none."""
    run = RunFolder(Path(shutil.copytree(trained, tmp_path / "run")))
    run.summary.write_text(json.dumps({"tokenizers": ["huggingface"]}))
    with refused(DataError, run.root):
        generate(run.root, PROMPT, 4, 0.0, 0)
    assert generate(run.root, PROMPT, 4, 0.0, 0, "bytes")["prompt_tokens"] == len(IDS)


@pytest.mark.world
def test_a_run_whose_newest_checkpoint_is_damaged_uses_the_one_before(trained: Path, tmp_path: Path) -> None:
    run, said = Path(shutil.copytree(trained, tmp_path / "run")), list[str]()
    (run / "checkpoints" / "step-00000002").mkdir()
    assert generate(run, PROMPT, 4, 0.0, 0, say=said.append)["step"] == 1
    assert said[0] == "warning: step-00000002 is damaged (manifest.json is missing); using step-00000001 instead"


def test_samples_are_repeatable_and_follow_the_seed(folder: Path) -> None:
    texts = [generate(folder, PROMPT, 30, 1.0, seed, "bytes")["tokens"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert generate(folder, PROMPT, 30, 1e-300, 1, "bytes") == generate(folder, PROMPT, 30, 0.0, 1, "bytes")


class Fixed(torch.nn.Module):
    """Stands for a model whose logits are always the same."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits, self.shape, self.norm = logits, config().model, torch.nn.LayerNorm(1)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attention: object) -> torch.Tensor:
        return self.logits.expand(len(tokens), -1)


def language(logits: dict[int, float], vocab: int = 258) -> Language:
    """A language of bytes with these logits, and -50 for all others."""
    all_logits = torch.full((vocab,), -50.0)
    for token, value in logits.items():
        all_logits[token] = value
    return Language(Fixed(all_logits), open_tokenizer("bytes"), 1000, Path("run"), None)  # type: ignore[arg-type]


def test_a_temperature_divides_the_logits() -> None:
    """2,000 samples of two tokens whose logits differ by 1, at T = 0.5: odds of e^2, to five standard deviations."""
    found = continued(language({65: 1.0, 66: 0.0}), [1], 2000, 0.5, 7).ids
    share = torch.tensor(2.0).sigmoid().item()
    assert abs(found.count(65) / 2000 - share) < 5 * (share * (1 - share) / 2000) ** 0.5
    assert set(found) == {65, 66}


def test_ids_that_only_pad_the_vocabulary_are_not_chosen() -> None:
    assert continued(language({65: 1.0, 299: 9.0}, vocab=300), [1], 2, 0.0, 0).ids == [65, 65]


def test_eos_ends_the_text() -> None:
    assert continued(language({257: 1.0}), [1], 5, 0.0, 0) == ([], "eos")


def test_logits_that_are_not_finite_are_refused() -> None:
    with refused(DataError, "run"):
        continued(language({0: float("nan")}), [1], 2, 0.0, 0)


def test_the_context_ends_the_text(folder: Path) -> None:
    said: list[str] = []
    found = generate(folder, "a" * 60, 10, 0.0, 0, "bytes", said.append)
    assert (found["prompt_tokens"], len(found["tokens"]), found["stopped"]) == (61, 3, "context")
    assert said[-1] == "stopped at the model's context of 64 tokens"
    assert generate(folder, "a" * 60, 3, 0.0, 0, "bytes")["stopped"] == "tokens"


def test_the_space_after_a_prompt_is_not_lost(tmp_path: Path) -> None:
    """Byte-level BPE has the space in the next token; SentencePiece would drop it at the beginning of a text."""
    tokenizer = open_tokenizer(str(chat_folder(tmp_path, None)))
    ids = tokenizer.encode("hello brave new world").tolist()
    for cut in range(1, len(ids)):
        assert tokenizer.decode(ids[:cut]) + module._text(tokenizer, ids[:cut], ids[cut:]) == tokenizer.decode(ids)


def test_what_cannot_be_continued_is_refused(folder: Path, tmp_path: Path) -> None:
    large = str(chat_folder(tmp_path / "large", None, size=400))
    (tmp_path / "none").mkdir()
    none, lost = tmp_path / "none", tmp_path / "lost"
    cases: list[tuple[Path, str, str | None, type[BytescaleError], str]] = [
        (folder, "", "bytes", ConfigError, "--prompt"),
        (folder, "a" * 64, "bytes", ConfigError, "--prompt"),
        (folder, PROMPT, None, DataError, str(folder)),
        (folder, PROMPT, "no/such", DataError, "no/such"),
        (folder, PROMPT, large, DataError, f"tokenizer of {folder}"),
        (none, PROMPT, None, CheckpointError, str(none)),
        (lost, PROMPT, None, CheckpointError, str(lost)),
    ]
    for source, prompt, tokenizer, kind, key in cases:
        with refused(kind, key):
            generate(source, prompt, 4, 0.0, 0, tokenizer)
