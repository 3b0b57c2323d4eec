"""The DeepSpeed settings of a run, from the typed config alone; nobody writes DeepSpeed JSON by hand.

DeepSpeed accepts unknown top-level keys in silence; a test holds each key here against
DeepSpeed's own names.
"""

from __future__ import annotations

from typing import Any

from engine.config.schema import Config
from engine.cost.flops import layer_weights
from engine.cost.states import bucket_elements

_BF16: dict[str, Any] = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
_HOST = {"device": "cpu", "pin_memory": True}  # pinned where the device is a GPU


def deepspeed_settings(config: Config) -> dict[str, Any]:
    """Return the settings for ZeRO over the whole world, with gradients accumulated by the caller.

    With `managed_gradient_accumulation` off, `backward` accumulates on the rank and nothing is reduced before `step`:
    ranks may run different numbers of micro-batches, and rings and reductions never meet (Note: [reductions and
    rings] in docs/design.md). In bf16, gradients accumulate in fp32, which in stage 1 selects BF16_Optimizer, unless
    optimizer states wait on the host.
    """
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": config.optimizer.clip_norm,
        "communication_data_type": "fp32",
        "zero_optimization": {
            "stage": config.zero.stage,
            "overlap_comm": False,
            "reduce_bucket_size": bucket_elements(config.model),  # DeepSpeed's own is 2 GB, however small the model
        }
        | (_gathering(config) if config.zero.stage == 3 else {})
        | ({"offload_optimizer": _HOST} if config.optimizer.on_host else {}),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # PyTorch's SGD may wait on the host too
        "steps_per_print": 2**31,
    }
    return settings | (_BF16 if config.dtype == "bf16" else {})


def _gathering(config: Config) -> dict[str, Any]:
    """Return what stage 3 gathers, and from where: the norms stay whole, and of the matrices two layers' at a time.

    What is computed in tiles is gathered once for all of them: ranks have different numbers of tiles.
    """
    model, layer = config.model, layer_weights(config.model, experts=config.model.experts)
    tiled = {"leaf_module": {"classes": [], "name_suffixes": ["ffn"]}} if config.mlp_tile else {}
    away = {"offload_param": _HOST} if config.zero.weights_on_host else {}
    return {
        "stage3_param_persistence_threshold": model.hidden,
        "stage3_prefetch_bucket_size": layer,
        "stage3_max_live_parameters": 2 * layer,
        "stage3_max_reuse_distance": 0,
    } | (tiled | away)
