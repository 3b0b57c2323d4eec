from __future__ import annotations

from deepspeed.runtime import constants
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils.config import TIMERS, get_timers_config

from engine.config.load import load
from engine.zero.settings import deepspeed_settings


def test_every_key_is_one_that_deepspeed_knows() -> None:
    """DeepSpeed silently ignores unknown top-level keys, so a mistyped one would train without its setting."""
    known = {value for value in vars(constants).values() if isinstance(value, str)}
    known |= {"zero_optimization", "bf16", "data_types", TIMERS}
    away = ["zero.stage=3", "zero.weights_on_host=true", "optimizer.on_host=true", "mlp_tile=64"]
    for keys in (["dtype=fp32"], ["dtype=bf16"], away):
        settings = deepspeed_settings(load(["recipe=quickstart", *keys]))
        assert set(settings) <= known, set(settings) - known
        fields = DeepSpeedZeroConfig.model_fields
        names = {*fields, *(field.alias for field in fields.values())}
        assert set(settings["zero_optimization"]) <= names


def test_bf16_accumulates_in_fp32() -> None:
    settings = deepspeed_settings(load(["recipe=quickstart", "dtype=bf16", "zero.stage=3"]))
    assert settings["data_types"]["grad_accum_dtype"] == "fp32"
    assert not settings["managed_gradient_accumulation"]


def test_the_throughput_timer_is_off() -> None:
    """It would synchronise the device in every forward pass."""
    assert not get_timers_config(deepspeed_settings(load(["recipe=quickstart"]))).enabled
