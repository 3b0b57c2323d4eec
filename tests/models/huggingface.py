"""Hugging Face's models as references, also without their casts to float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from engine.models.llama.model import Llama
from engine.weights.check import places


@contextmanager
def without_float32_casts(*modules: ModuleType) -> Iterator[None]:
    """Patch out the casts to float32 in Hugging Face's modules: what they call float or float32 is float64."""
    wide = SimpleNamespace(**vars(torch) | {"float": torch.float64, "float32": torch.float64})
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "torch", wide)
        patch.setattr(Tensor, "float", Tensor.double)
        yield


@torch.no_grad()
def fill(model: Llama, stored: Mapping[str, Tensor]) -> None:
    """Give a model of ours the tensors that Hugging Face stores."""
    for name, place in places(model, model.shape).items():
        place.copy_(stored[name])
