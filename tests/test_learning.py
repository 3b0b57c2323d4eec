"""The quickstart model needs attention: with its output set to zero, training stays above the bigram entropy.

`make quickstart` compares its validation loss with the bigram entropy of the corpus; the slow test shows that the
comparison means something. If attention gives zero, logits depend on the current token only, so the loss of a step is
that of its pairs of tokens, which is exact and cheap to compute.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.config.load import load
from engine.data.blocks.blocks import Range
from engine.data.corpus import Reader
from engine.data.order import ORDER
from engine.data.overview import Corpora
from engine.data.sequences import SequenceTable
from engine.data.steps import Cursor
from engine.data.tokenizers.bytes import VOCAB
from engine.models.common.attention import LocalAttention
from engine.models.common.initialise import initialise
from engine.models.common.loss import token_loss
from engine.models.decoder import Decoder
from engine.trainer.optimizer import build_optimizer
from engine.trainer.schedule import learning_rate


class Muted(LocalAttention):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.zeros_like(q)


def pairs(reader: Reader, table: SequenceTable) -> Tensor:
    """Count how often each label follows each input in the sequences of a step, [vocab, vocab]."""
    counts = np.zeros(VOCAB * VOCAB, dtype=np.int64)
    columns = table.block, table.document, table.start, table.start + table.length + 1, table.hash
    sequences = zip(*map(np.ndarray.tolist, columns), strict=True)
    for tokens, _ in reader.read([Range("data", *sequence) for sequence in sequences]):
        counts += np.bincount(tokens[:-1] * VOCAB + tokens[1:], minlength=VOCAB * VOCAB)
    return torch.from_numpy(counts.reshape(VOCAB, VOCAB))


def muted_loss(model: Decoder, counts: Tensor) -> Tensor:
    """Compute the mean loss of a step for a model without attention."""
    positions = torch.zeros(VOCAB, dtype=torch.long)
    logits = model(torch.arange(VOCAB), positions, attention=Muted(positions))
    return -(counts * logits[:, :VOCAB].log_softmax(-1)).sum() / counts.sum()


def test_pairs_are_all_that_a_model_without_attention_sees() -> None:
    model = Decoder(load(["recipe=quickstart"]).model)
    initialise(model, 1)
    tokens = torch.randint(0, VOCAB, (300,), generator=torch.Generator().manual_seed(0))
    counts = torch.zeros(VOCAB, VOCAB)
    counts.index_put_((tokens[:-1], tokens[1:]), torch.tensor(1.0), accumulate=True)
    positions = torch.arange(299)
    direct = token_loss(model(tokens[:-1], positions, attention=Muted(positions)), tokens[1:]) / 299
    assert abs(direct.item() - muted_loss(model, counts).item()) < 1e-5


@pytest.mark.slow  # all 600 steps of the quickstart recipe
def test_the_quickstart_without_attention_stays_above_the_bigram_entropy() -> None:
    config = load(["recipe=quickstart"])
    corpora, cursor = Corpora(config), Cursor()
    corpora.pack_first(cursor, print)
    reader = Reader(corpora.sources, VOCAB)
    model = Decoder(config.model)
    initialise(model, config.run.seed)
    optimizer = build_optimizer(model, config.optimizer)
    for step in range(1, config.run.steps + 1):
        found = corpora.steps.next(cursor)
        assert found is not None
        table, cursor = found
        optimizer.zero_grad()
        muted_loss(model, pairs(reader, table)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.run.steps, config.optimizer)
        optimizer.step()
    validation = pairs(reader, corpora.steps.validation(ORDER)["data"])
    with torch.no_grad():
        loss = muted_loss(model, validation).item()
    assert corpora.overview is not None and (nats := corpora.overview.bigram_nats) is not None
    assert loss > nats, f"{loss:.3f} against {nats:.3f}: the corpus is too easy to show it"
    assert loss < nats + 1, "it did not learn the pairs either: the test shows too little"
