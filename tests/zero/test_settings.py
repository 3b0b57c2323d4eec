from __future__ import annotations

from deepspeed.runtime import constants
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from engine.config.load import load
from engine.zero.settings import deepspeed_settings


def test_every_key_is_one_that_deepspeed_knows() -> None:
    """DeepSpeed takes unknown top-level keys in silence, so a mistyped one would train without its setting."""
    known = {value for value in vars(constants).values() if isinstance(value, str)}
    known |= {"zero_optimization", "bf16", "data_types"}
    for dtype in ("fp32", "bf16"):
        settings = deepspeed_settings(load(["recipe=quickstart", f"dtype={dtype}"]))
        assert set(settings) <= known, set(settings) - known
        assert set(settings["zero_optimization"]) <= set(DeepSpeedZeroConfig.model_fields)


def test_bf16_accumulates_in_fp32() -> None:
    settings = deepspeed_settings(load(["recipe=quickstart", "dtype=bf16"]))
    assert settings["data_types"]["grad_accum_dtype"] == "fp32"
    assert not settings["managed_gradient_accumulation"]
