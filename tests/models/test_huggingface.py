"""Our models against Hugging Face's: logits, loss and every gradient; and the names of what they store.

If these fail, weights of models mean something else here. Error of a tensor = max|a - b| / max|b|.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.config.schema import Model
from engine.family.families import family_of
from tests.models.huggingface import compare, huggingface, ours_of, under_our_names, without_float32_casts
from tests.models.shapes import LLAMA, MIXTRAL, QWEN3, QWEN3_MOE

SHAPES = {f"llama {name}": shape for name, shape in LLAMA.items()}
SHAPES |= {f"mixtral {name}": shape for name, shape in MIXTRAL.items()}
SHAPES |= {f"qwen3 {name}": shape for name, shape in QWEN3.items()}
SHAPES |= {f"qwen3_moe {name}": shape for name, shape in QWEN3_MOE.items()}
FAMILIES = ["llama gqa", "mixtral gqa", "qwen3 gqa", "qwen3_moe gqa"]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_float32_is_theirs_as_it_is(shape: Model) -> None:
    found = compare(shape, torch.float32)
    assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_float64_is_theirs_without_their_casts(shape: Model) -> None:
    with without_float32_casts():
        found = compare(shape, torch.float64)
    assert max(found.values()) < 1e-9, found


@pytest.mark.parametrize("shape", [SHAPES[name] for name in FAMILIES], ids=FAMILIES)
def test_names_are_those_that_they_store(shape: Model, tmp_path: Path) -> None:
    theirs = huggingface(shape, torch.float32)
    theirs.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    found, expected = under_our_names(state, shape), ours_of(theirs, shape, torch.float32).state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    experts = 3 if shape.experts == 1 else 1 + 3 * shape.experts  # and a router
    assert len(state) == 3 + shape.layers * (6 + experts + 2 * family_of(shape).qk_norm)
