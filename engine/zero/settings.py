"""Derives DeepSpeed's settings from the typed config, so users write no DeepSpeed JSON.

DeepSpeed silently ignores unknown top-level keys, so a test compares every key here with DeepSpeed's names.
"""

from __future__ import annotations

from typing import Any

from engine.config.schema import Config
from engine.cost.collectives import LIVE_LAYERS
from engine.cost.flops import largest_layer
from engine.cost.sizes import bucket_elements

_HOST = {"device": "cpu", "pin_memory": True}  # without a GPU, memory is not pinned


def deepspeed_settings(config: Config) -> dict[str, Any]:
    """Return the DeepSpeed config for ZeRO over all HDP ranks.

    With `managed_gradient_accumulation` off, DeepSpeed's engine leaves it to `step` when gradients are complete. In
    stages 1 and 2 the optimizer is ours (sharded.py) and reads none of them.
    """
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "bf16": {"enabled": config.dtype == "bf16"},
        "zero_optimization": {"stage": config.zero.stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
        # The throughput timer is on by default and synchronises the device in every forward pass and step.
        "timers": {"throughput": {"enabled": False}},
    }
    return settings | optimizer_settings(config) if config.zero.stage == 3 else settings


def optimizer_settings(config: Config) -> dict[str, Any]:
    """Return the settings of DeepSpeed's own optimizer, of stage 3."""
    # Gather at most LIVE_LAYERS at a time. Norms stay unsharded: they are small, and each gather costs latency.
    layer = largest_layer(config.model, experts=config.model.experts)
    zero: dict[str, Any] = {
        "stage": 3,
        "overlap_comm": False,
        "reduce_bucket_size": bucket_elements(config),  # the default uses 2 GB, even for a small model
        "stage3_param_persistence_threshold": config.model.hidden,
        "stage3_prefetch_bucket_size": layer,
        "stage3_max_live_parameters": LIVE_LAYERS * layer,
        "stage3_max_reuse_distance": 0,
    }
    if config.mlp_tile:
        # Gather once for all tiles of a layer: one per tile would hang, as ranks have different numbers of tiles.
        zero["leaf_module"] = {"classes": [], "name_suffixes": ["ffn"]}
    if config.optimizer.on_host:
        zero["offload_optimizer"] = _HOST
    if config.zero.weights_on_host:
        zero["offload_param"] = _HOST
    return {
        "zero_optimization": zero,
        "gradient_clipping": config.optimizer.clip_norm,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"} if config.dtype == "bf16" else {},
        "zero_force_ds_cpu_optimizer": False,  # allows PyTorch's optimizers with states on the host
    }
