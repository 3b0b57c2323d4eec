"""The typed config: what a recipe may say. Frozen, strict at every level; the field's description is its help text.

Nothing beyond `engine/config` sees YAML or a DictConfig. Lengths are tokens, sizes are bytes, rates are per step.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.config.units import Bytes, Tokens

_STEPS = 99_999_999  # the digits of a checkpoint's name
_TOKENS = 2**32


class Section(BaseModel):
    """A frozen part of the config that accepts no unknown key."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Run(Section):
    """The run: its length, its seed and where it writes."""

    steps: int = Field(ge=1, le=_STEPS, description="optimizer updates")
    seed: int = Field(ge=0, lt=2**63, description="seed of the initial weights and of the order of documents")
    weights: str | None = Field(description="Hugging Face folder to start from; null draws the weights with seed")
    out: str = Field(min_length=1, description="run folder")
    validate_every: int = Field(
        ge=1, le=_STEPS, description="steps between two validations; the last step always validates"
    )
    checkpoint_every: int = Field(
        ge=1, le=_STEPS, description="steps between two checkpoints; the last step always saves one"
    )
    keep_checkpoints: int = Field(ge=1, le=_STEPS, description="how many of the newest checkpoints stay")


class Rope(Section):
    """How rotary angles are scaled for contexts longer than the original one; names as in Hugging Face's configs."""

    kind: Literal["none", "linear", "yarn", "llama3"] = Field(description="`none` is the plain model.rope_theta")
    factor: float | None = Field(ge=1, le=1e6, description="how many times longer the context becomes")
    original_max_position_embeddings: Tokens | None = Field(
        ge=1, le=_TOKENS, description="context before scaling; yarn, llama3"
    )
    low_freq_factor: float | None = Field(
        gt=0, le=1e6, description="llama3: pairs of fewer turns in it are slowed by factor"
    )
    high_freq_factor: float | None = Field(gt=0, le=1e6, description="llama3: pairs of more turns in it stay")
    beta_fast: float | None = Field(gt=0, le=1e6, description="yarn: pairs of more turns in it stay; null is 32")
    beta_slow: float | None = Field(
        gt=0, le=1e6, description="yarn: pairs of fewer turns are slowed by factor; null is 1"
    )
    attention_factor: float | None = Field(
        gt=0, le=1e6, description="yarn: scale of cos and sin; null follows from factor"
    )
    mscale: float | None = Field(gt=0, le=1e6, description="yarn, with mscale_all_dim: DeepSeek's attention factor")
    mscale_all_dim: float | None = Field(gt=0, le=1e6, description="yarn, with mscale: DeepSeek's attention factor")


class Model(Section):
    """The shape of a LLaMA model, with experts of a Mixtral one."""

    name: str
    layers: int = Field(ge=1, le=2**20, description="transformer blocks")
    hidden: int = Field(ge=2, le=2**31, description="width of the residual stream")
    heads: int = Field(ge=1, le=2**31, description="query heads")
    kv_heads: int = Field(ge=1, le=2**31, description="key and value heads; divides heads")
    ffn: int = Field(ge=1, le=2**31, description="width of the SwiGLU layer, or of each expert")
    experts: int = Field(ge=1, le=2**20, description="experts of a layer; 1 is a dense model")
    top_k: int = Field(ge=1, le=2**20, description="experts that a token is sent to")
    vocab: int = Field(ge=1, le=2**31, description="rows of the embedding")
    rope_theta: float = Field(gt=1, le=1e12, description="base of the rotary angles")
    rope: Rope
    norm_eps: float = Field(ge=1e-12, le=1, description="what RMSNorm adds under its root")
    tied: bool = Field(description="the output head shares the embedding's weights")

    @property
    def head_dim(self) -> int:
        """Return the size of a head."""
        return self.hidden // self.heads


class Balance(Section):
    """What keeps the experts of a layer equally busy; a dense model has none of it."""

    by: Literal["none", "loss", "bias"] = Field(description="a loss of each sequence, or a bias moved after each step")
    loss_weight: float = Field(ge=0, le=1000, description="of the balance loss, beside the cross-entropy")
    bias_rate: float = Field(
        ge=0, le=1, description="how far a step moves a bias; router probabilities are from 0 to 1"
    )
    z_weight: float = Field(ge=0, le=1000, description="of the router's z-loss, which keeps its logits small")


class Data(Section):
    """Where documents come from."""

    name: str
    path: str = Field(
        min_length=1, description="a folder, a .jsonl file, or `stdlib`: the running Python's own library"
    )
    format: Literal["folder", "jsonl"]
    pattern: str = Field(description="which files of a folder are documents, as a glob")
    field: str = Field(description="which field of a JSONL line is the text")
    encoding: Literal["utf-8", "bytes"] = Field(description="`bytes` takes files as they are, UTF-8 or not")
    tokenizer: Literal["bytes"]
    runtime: Literal["local"] = Field(description="`ray` is not built yet")
    validation_share: float = Field(ge=0, lt=1, description="share of the documents, by hash, kept for validation")
    validation_tokens: Tokens = Field(
        ge=0, le=_TOKENS, description="at most this many inputs are validated on; 0 turns it off"
    )


class Cluster(Section):
    """The machine that is planned for or trained on."""

    name: str
    nodes: int = Field(ge=1, le=65536, description="machines")
    ranks_per_node: int = Field(ge=1, le=64, description="one rank is one GPU or one CPU process")
    device_memory: Bytes = Field(
        gt=0, le=2**50, description="bytes of a device, its runtime's included (docs/memory.md)"
    )
    host_memory: Bytes = Field(ge=0, le=2**50, description="bytes of the host that one rank may offload to")
    hostfile: str | None = Field(description="DeepSpeed's format; then nodes and ranks come from it")
    calibration: str | None = Field(description="file of `profile-hardware`; else the data sheet's figures")


class Planner(Section):
    """Who computes what."""

    name: Literal["static", "naive", "balanced", "adaptive"] = Field(description="the two middle ones are the paper's")
    mode: Literal["auto", "free", "lockstep", "pipeline"] = Field(
        description="`auto` follows zero.stage and parallel.pp"
    )
    max_peers: int = Field(ge=1, le=2**20, description="ranks that one rank may talk to in a step")


class Optimizer(Section):
    """The update rule, its learning rate and its schedule."""

    name: Literal["adamw", "sgd"]
    lr: float = Field(gt=0, le=1e30, description="learning rate after the warm-up")
    min_lr_ratio: float = Field(ge=0, le=1, description="where the cosine ends, as a share of lr")
    warmup_steps: int = Field(ge=0, le=_STEPS, description="steps in which the learning rate rises")
    betas: tuple[float, float] = Field(description="AdamW's; SGD's momentum is the first")
    eps: float = Field(gt=0, le=1, description="what AdamW adds to its divisor")
    weight_decay: float = Field(ge=0, le=1000, description="on matrices only")
    clip_norm: float = Field(ge=0, le=1e12, description="largest gradient norm over all ranks; 0 turns clipping off")
    on_host: bool = Field(description="moments and fp32 masters wait on the host; AdamW is DeepSpeedCPUAdam then")


class Zero(Section):
    """How model states are sharded over all ranks."""

    stage: Literal[1, 2, 3] = Field(description="1 shards optimizer states, 2 gradients too, 3 also weights")
    weights_on_host: bool = Field(description="stage 3: a rank's share of the weights waits on the host")


class Offload(Section):
    """Activation offload."""

    ratio: Literal["auto"] | float = Field(description="most of a micro-batch that may go to the host, 0 to 1")


class Lengths(Section):
    """Where `plan` takes sequence lengths from: the recipe's data, a named mix, or a file."""

    name: Literal["data", "github", "byted", "lognormal", "file"]
    path: str | None = Field(description="of `file`: one length a line")
    mean: float = Field(gt=0, le=_TOKENS, description="mean length of `lognormal`, tokens")
    sigma: float = Field(gt=0, le=10, description="spread of `lognormal`")
    max: Tokens = Field(ge=1, le=_TOKENS, description="longest document of a mix")


class Parallel(Section):
    """Degrees orthogonal to HDP; tp and pp can be planned, not trained yet."""

    tp: int = Field(ge=1, le=2**16, description="devices that share each layer's matrices")
    pp: int = Field(ge=1, le=2**16, description="stages of a pipeline")
    ep: Literal[1]


class Config(Section):
    """A whole recipe."""

    recipe: str = Field(description="name of the recipe")
    context: Tokens = Field(ge=1, le=_TOKENS, description="most inputs of one sequence; longer documents are split")
    capacity: Tokens = Field(ge=1, le=_TOKENS, description="tokens that a rank holds in one micro-batch")
    batch_tokens: Tokens = Field(
        ge=1, le=_TOKENS, description="inputs of a step; a longer document is a step of its own"
    )
    dtype: Literal["bf16", "fp32", "fp64"] = Field(description="bf16 trains beside fp32 masters; fp64 is for tests")
    recompute: Literal["none", "layer", "layer_keep_attention"] = Field(
        description="compute anew in the backward pass: each layer, or all of it but attention"
    )
    mlp_tile: Tokens = Field(
        ge=0, description="tokens that SwiGLU computes at a time, and anew in the backward pass; 0 is all"
    )
    compile: Literal["auto", "always", "never"] = Field(
        description="pointwise parts of layers by torch.compile; `auto` does so on GPUs"
    )
    run: Run
    model: Model
    balance: Balance
    data: Data
    cluster: Cluster
    planner: Planner
    optimizer: Optimizer
    zero: Zero
    offload: Offload
    lengths: Lengths
    parallel: Parallel
