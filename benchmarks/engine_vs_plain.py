"""Tokens per CPU second of one rank, compared with a plain PyTorch loop on transformers' Llama.

`python benchmarks/engine_vs_plain.py [--steps 8]` trains three copies of one model (3.5M parameters, float32, one
thread) with the same optimizer on the same documents (lognormal, mean 900 tokens, at most 8K), alternating by step:

- the engine, as `bytescale train` runs it: planned micro-batches of up to 8K packed tokens through ZeRO-1;
- a plain loop, one document at a time;
- a plain loop over batches of up to 8K tokens, sorted by length and padded to the longest.

The first step is a warm-up and is not counted. CPU time is that of this process; the engine plans in another process,
which takes a thousandth of the time. The exit code is 1 if the losses of a step differ by more than 1e-4 of their
value, because then the three loops would not do the same work.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.one_rank import joined
from engine.config.load import load
from engine.config.schema import Config
from engine.data.inputs import IGNORE
from engine.data.overview import Corpora
from engine.data.runtime.runtime import PlannedSequences
from engine.launch.prepare import write_facts
from engine.planner.make import plan_step
from engine.run.folder import RunFolder
from engine.trainer.loop import Trainer
from engine.trainer.schedule import learning_rate

TOLERANCE = 1e-4
CAPACITY = 8192  # tokens of a micro-batch, and of the longest document
SHAPE = {"hidden": 256, "layers": 4, "heads": 8, "kv_heads": 8, "ffn": 768}
Document = tuple[Tensor, Tensor]  # inputs and labels, [T]


def documents(count: int, seed: int = 0) -> list[bytes]:
    """Generate `count` documents of random letters; lengths are lognormal (mean 900, sigma 1), below the capacity."""
    random = np.random.default_rng(seed)
    lengths = np.clip(random.lognormal(np.log(900) - 0.5, 1.0, count), 1, CAPACITY - 2).astype(int)
    return [bytes(random.integers(97, 123, length, dtype=np.uint8)) for length in lengths.tolist()]


def plain_model(config: Config) -> Any:
    """Build transformers' Llama of the config's shape with PyTorch's fused attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = config.model
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocab,
            hidden_size=shape.hidden,
            intermediate_size=shape.ffn,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            max_position_embeddings=CAPACITY,
            rms_norm_eps=shape.norm_eps,
            rope_theta=shape.rope_theta,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )


class PlainLoop:
    """A training loop in plain PyTorch. `batches` divides the documents of a step into batches."""

    def __init__(self, config: Config, weights: Path, batches: Callable[[list[Document]], Iterator[list[Document]]]):
        from transformers import LlamaForCausalLM

        self.config, self.batches = config, batches
        self.model = LlamaForCausalLM.from_pretrained(weights, attn_implementation="sdpa", dtype=torch.float32)
        self.model.train()
        own = config.optimizer
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        norms = [p for p in self.model.parameters() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": own.weight_decay}, {"params": norms, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=own.lr, betas=own.betas, eps=own.eps, fused=True)

    def step(self, number: int, step_documents: list[Document]) -> float:
        """Train on the documents of step `number` (the first is 1); return the mean loss per token."""
        tokens = sum(int((labels != IGNORE).sum()) for _, labels in step_documents)
        total = 0.0
        for batch in self.batches(step_documents):
            width = max(len(inputs) for inputs, _ in batch)
            inputs = torch.stack([F.pad(one, (0, width - len(one))) for one, _ in batch])
            labels = torch.stack([F.pad(one, (0, width - len(one)), value=IGNORE) for _, one in batch])
            # Padding follows the tokens, so with the causal mask it does not affect any result.
            logits = self.model(input_ids=inputs).logits
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
            (loss / tokens).backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(number, self.config.run.steps, self.config.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total / tokens


def one_by_one(step_documents: list[Document]) -> Iterator[list[Document]]:
    """Yield each document as its own batch."""
    return ([document] for document in step_documents)


def padded(step_documents: list[Document]) -> Iterator[list[Document]]:
    """Yield batches of documents of similar length, with at most CAPACITY tokens including padding."""
    batch: list[Document] = []
    for document in sorted(step_documents, key=lambda one: len(one[0])):
        if batch and len(document[0]) * (len(batch) + 1) > CAPACITY:
            yield batch
            batch = []
        batch.append(document)
    yield batch


def documents_of_step(trainer: Trainer, corpora: Corpora) -> list[Document]:
    """Read the documents of the step that the trainer runs next."""
    found = corpora.steps.next(trainer.cursor)
    assert found is not None
    table = found[0]
    planned = PlannedSequences(table, plan_step(table.length, trainer.settings))
    read, pieces = trainer.data.input_reader(planned), list[Document]()
    for micro in planned.plan.of_rank(0):
        inputs = read(micro)
        starts = [*np.flatnonzero(inputs.positions == 0), len(inputs.positions)]
        for start, stop in pairwise(starts):
            pieces.append((torch.from_numpy(inputs.tokens[start:stop]), torch.from_numpy(inputs.labels[start:stop])))
    return pieces


def measure(folder: Path, steps: int) -> dict[str, float]:
    """Run `steps` measured steps of each loop; return its tokens per CPU second by name.

    Raises SystemExit if losses differ.
    """
    corpus = folder / "documents.jsonl"
    corpus.write_text("".join(json.dumps({"text": text.decode()}) + "\n" for text in documents(60 * (steps + 1))))
    shape = [f"model.{key}={value}" for key, value in SHAPE.items()]
    lengths = [f"context={CAPACITY}", f"capacity={CAPACITY}", "batch_tokens=16K", "data.validation_tokens=0"]
    run = [f"run.out={folder / 'run'}", "run.steps=1000", "run.checkpoint_every=1000", "cluster.ranks_per_node=1"]
    config = load(["recipe=quickstart", "data=jsonl", f"data.path={corpus}", *shape, *lengths, *run])
    plain_model(config).save_pretrained(folder / "weights")
    run_folder = RunFolder(folder / "run")
    run_folder.logs.mkdir(parents=True)
    run_folder.checkpoints.mkdir()
    corpora = Corpora(config)
    write_facts(run_folder, config, corpora, 0)
    seconds, tokens = dict.fromkeys(("engine", "one by one", "padded"), 0.0), 0
    with joined(config) as groups:
        trainer = Trainer(run_folder, config, groups, str(folder / "weights"))
        trainer.begin(None)
        loops = {"one by one": one_by_one, "padded": padded}
        plain = {name: PlainLoop(config, folder / "weights", batches) for name, batches in loops.items()}
        for number in range(1, steps + 2):
            step_documents, losses = documents_of_step(trainer, corpora), {}
            began = time.process_time()
            trainer.one_step(lambda: False)
            ends = [time.process_time()]
            losses["engine"] = json.loads(run_folder.metrics.read_text().splitlines()[-1])["loss"]
            for name, loop in plain.items():
                losses[name] = loop.step(number, step_documents)
                ends.append(time.process_time())
            if max(losses.values()) - min(losses.values()) > TOLERANCE * min(losses.values()):
                raise SystemExit(f"the losses of step {number} differ: {losses}")
            if number > 1:  # the first step warms up
                tokens += sum(len(inputs) for inputs, _ in step_documents)
                for name, start, stop in zip(seconds, [began, *ends], ends, strict=False):
                    seconds[name] += stop - start
        trainer.data.close()
    return {name: tokens / spent for name, spent in seconds.items()}


def main() -> None:
    """Print the rate of each loop, and the engine's rate divided by it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), parser.parse_args().steps)
    print("| loop | tokens / CPU s | engine / this loop |\n|---|---|---|")
    for name, rate in found.items():
        print(f"| {name} | {rate:,.0f} | {found['engine'] / rate:.2f} |")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
