"""Recipes at settings that tests compute with. Those of the packaged recipes change when a recipe is tuned."""

from __future__ import annotations


def fixed(recipe: str, stage: int = 1) -> list[str]:
    """Overrides of one device a rank, 8K tokens in each micro-batch, nothing recomputed."""
    memory = [f"zero.stage={stage}", "recompute=none", "offload.ratio=auto", "capacity=8K"]
    return [f"recipe={recipe}", "parallel.tp=1", "parallel.pp=1", *memory]


LLAMA7B_256K, LLAMA7B_2M = fixed("llama7b-256k"), fixed("llama7b-2m")
LLAMA3_8B_256K, LLAMA3_8B_512K, LLAMA3_8B_2M = (fixed(f"llama3-8b-{context}", 3) for context in ("256k", "512k", "2m"))
