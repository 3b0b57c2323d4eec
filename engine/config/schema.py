"""The typed config: every key of a recipe. Frozen and strict at every level; a field's description is its help text.

Nothing outside `engine/config` sees YAML or a DictConfig. Lengths are in tokens, sizes in bytes.
"""

from __future__ import annotations

import glob
import posixpath
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveInt

from engine.config.choices import Choice
from engine.config.transform import Step
from engine.config.units import Bytes, Tokens

_STEPS = 99_999_999  # a checkpoint's name has eight digits
_TOKENS = 2**32
WORD = r"^[\w.,:@+-]+$"
IMAGE = r"^[A-Za-z0-9][A-Za-z0-9._/:@-]*$"
DNS_NAME = r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$"  # RFC 1123, as Kubernetes has it
DNS_LABEL = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"


class Section(BaseModel):
    """A frozen part of the config; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Run(Section):
    """The run: its length, its seed and where it writes."""

    steps: int = Field(ge=1, le=_STEPS, description="optimizer updates")
    seed: int = Field(ge=0, lt=2**63, description="seed of the initial weights and of the order of documents")
    weights: str | None = Field(
        description="Hugging Face folder with initial weights, whose model and tokenizer are used; null: from run.seed"
    )
    out: str = Field(min_length=1, description="run folder")
    validate_every: int = Field(
        ge=1, le=_STEPS, description="steps between two validations; the last step always validates"
    )
    checkpoint_every: int = Field(
        ge=1, le=_STEPS, description="steps between two checkpoints; the last step always saves one"
    )
    keep_checkpoints: int = Field(ge=1, le=_STEPS, description="number of newest checkpoints to keep")
    keep_every: int = Field(
        ge=0, le=_STEPS, description="also keep the checkpoints of steps that are multiples of this; 0 for none"
    )
    keep_best: int = Field(
        ge=0, le=_STEPS, description="also keep this many checkpoints with the lowest validation losses"
    )
    remote: str | None = Field(
        description="URL of a folder to which finished checkpoints are copied, such as s3://bucket/run; null for none"
    )
    restarts: int = Field(
        ge=0,
        le=1000,
        description="how often a run restarts automatically from its last checkpoint after its ranks failed or hung",
    )
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = Field(
        examples=["[tensorboard,wandb]"],
        description="trackers that get the metrics of each step: tensorboard, wandb, mlflow; training continues if one "
        "fails",
    )
    on_nan: Literal["stop", "skip"] = Field(
        description="a step whose loss or gradient norm is not finite stops the run, or its update is skipped"
    )
    max_skips: int = Field(
        ge=1, le=_STEPS, description="most updates in a row that run.on_nan=skip skips; then the run stops"
    )
    notice_file: str | None = Field(
        description="file whose creation announces the loss of a host; the run then saves a checkpoint and ends"
    )
    chaos: bool = Field(description="allow `bytescale chaos` to harm this run, for tests")


class Rope(Section):
    """Scaling of the rotary angles for contexts longer than the original one; names as in Hugging Face's configs."""

    kind: Literal["none", "linear", "yarn", "llama3"] = Field(
        description="kind of scaling; `none` uses model.rope_theta unscaled"
    )
    factor: float | None = Field(ge=1, le=1e6, description="new context / original context")
    original_max_position_embeddings: Tokens | None = Field(
        ge=1, le=_TOKENS, description="original context, in tokens; for yarn and llama3"
    )
    low_freq_factor: float | None = Field(
        gt=0,
        le=1e6,
        description="llama3: rotary frequencies with fewer than this many rotations over the original context are "
        "divided by model.rope.factor",
    )
    high_freq_factor: float | None = Field(
        gt=0,
        le=1e6,
        description="llama3: rotary frequencies with more than this many rotations over the original context are "
        "not scaled",
    )
    beta_fast: float | None = Field(
        gt=0,
        le=1e6,
        description="yarn: rotary frequencies with more than this many rotations over the original context are not "
        "scaled; null is 32",
    )
    beta_slow: float | None = Field(
        gt=0,
        le=1e6,
        description="yarn: rotary frequencies with fewer than this many rotations over the original context are "
        "divided by model.rope.factor; null is 1",
    )
    attention_factor: float | None = Field(
        gt=0, le=1e6, description="yarn: factor applied to cos and sin; null computes it from model.rope.factor"
    )
    mscale: float | None = Field(
        gt=0, le=1e6, description="yarn: mscale of DeepSeek's attention factor; set together with mscale_all_dim"
    )
    mscale_all_dim: float | None = Field(
        gt=0, le=1e6, description="yarn: mscale_all_dim of DeepSeek's attention factor; set together with mscale"
    )


class Model(Section):
    """The family and the shape of a model."""

    name: str
    family: Literal["llama", "mixtral", "qwen3", "qwen3_moe"] = Field(
        description="which layers the model has, and how Hugging Face names and stores them"
    )
    layers: int = Field(ge=1, le=2**20, description="transformer blocks")
    hidden: int = Field(ge=2, le=2**31, description="width of the residual stream")
    heads: int = Field(ge=1, le=2**31, description="query heads")
    kv_heads: int = Field(ge=1, le=2**31, description="key-value heads; a divisor of model.heads")
    head_size: int | None = Field(ge=2, le=2**16, description="width of a head; null is model.hidden / model.heads")
    ffn: int = Field(ge=1, le=2**31, description="inner width of the SwiGLU layer, or of each expert")
    experts: int = Field(ge=1, le=2**20, description="experts per layer; 1 is a dense model")
    top_k: int = Field(ge=1, le=2**20, description="experts per token")
    norm_top_k: bool = Field(description="divide the router's probabilities of a token's experts by their sum")
    vocab: int = Field(ge=1, le=2**31, description="vocabulary size: rows of the embedding")
    rope_theta: float = Field(gt=1, le=1e12, description="base of the rotary angles")
    rope: Rope
    norm_eps: float = Field(ge=1e-12, le=1, description="epsilon under the square root of RMSNorm")
    tied: bool = Field(description="share weights between the embedding and the output head")
    window: Tokens | None = Field(
        ge=1,
        le=_TOKENS,
        examples=["4K"],
        description="attention window: most tokens that a token attends to, itself included; null: all before it. "
        "Layers with a window can be planned and estimated, but not trained yet",
    )
    windowed: tuple[bool, ...] = Field(
        min_length=1,
        max_length=1024,
        examples=["[true,false]"],
        description="which layers have the window, in order of depth, repeated: [true,false] is every second one",
    )

    @property
    def head_dim(self) -> int:
        return self.head_size or self.hidden // self.heads


class Balance(Section):
    """Load balancing of experts; a dense model ignores it."""

    by: Literal["none", "loss", "bias"] = Field(
        description="`loss` adds an auxiliary loss per sequence, `bias` adjusts a bias per expert after each step"
    )
    loss_weight: float = Field(ge=0, le=1000, description="weight of the load balancing loss")
    bias_rate: float = Field(
        ge=0, le=1, description="change to each bias per step; router probabilities are between 0 and 1"
    )
    z_weight: float = Field(ge=0, le=1000, description="weight of the router's z-loss, which keeps its logits small")


_Path = Annotated[str, Field(min_length=1)]
FORMATS = "engine.data.sources.formats:FORMATS"
RUNTIMES = "engine.data.runtime.runtimes:RUNTIMES"
_Format = Annotated[str, Choice(FORMATS, others=("tokens",))]
_Encoding = Literal["utf-8", "bytes"]
# A line's end is hard to type in a shell: `\n` stands for it, as in YAML's double quotes.
_Separator = Annotated[
    str, Field(min_length=1, max_length=1024), AfterValidator(lambda text: text.replace("\\n", "\n"))
]
_TRANSFORM = "[{drop: {shorter: 64}}]"
_Length = Annotated[Tokens, Field(ge=1, le=_TOKENS)]
_Exhausted = Literal["repeat", "drop", "stop"]
Schedule = Literal["constant", "linear", "cosine"]
SOURCE_NAME = r"^[A-Za-z_][A-Za-z0-9_-]{0,31}$"


class Source(Section):
    """A source of a mixture: the keys whose values differ from those of `data`; null is the value of `data`."""

    path: _Path | tuple[_Path, ...] | None = None
    format: _Format | None = None
    pattern: str | None = None
    separator: _Separator | None = None
    field: str | None = None
    encoding: _Encoding | None = None
    transform: tuple[Step, ...] | None = Field(default=None, examples=[_TRANSFORM])
    exhausted: _Exhausted | None = None


class Segment(Section):
    """Weights of sources from a step, or from a number of tokens of the run, on. The first segment starts at 0."""

    step: int | None = Field(default=None, ge=0, le=_STEPS, examples=["1000"])
    tokens: Tokens | None = Field(default=None, ge=0, lt=2**63, examples=["2G"])
    weights: dict[str, Annotated[float, Field(ge=0)]] = Field(examples=["{web: 3, code: 1}"])
    # Least and most inputs of the documents that are taken; None: any
    lengths: tuple[_Length, _Length] | None = Field(default=None, examples=["[1, 8K]"])
    schedule: Schedule = "constant"  # of the previous segment's weights, up to this start

    @property
    def start(self) -> int:
        """The step or the number of tokens."""
        return self.step or self.tokens or 0


ADDRESS = r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):[0-9]{1,5}$"


class Ray(Section):
    """The data plane on Ray, for data.runtime=ray."""

    address: str | None = Field(
        pattern=ADDRESS,
        examples=["10.0.0.1:6379"],
        description="HOST:PORT of a Ray cluster whose node on host N of the run, from 0 on, has the resource "
        "bytescale-host-N; null: the run starts its own",
    )
    loaders: tuple[Annotated[int, Field(ge=1, le=2**20)], ...] | None = Field(
        min_length=2,
        max_length=2,
        examples=["[2,16]"],
        description="least and most processes of all hosts that read and tokenize documents, each host at least one; "
        "null: data.loaders",
    )
    standbys: int = Field(ge=0, le=64, description="processes per host that wait to replace one that dies")
    deadline: float = Field(
        ge=0.5, le=3600, description="seconds without a sign of life after which a process is replaced"
    )
    memory: Bytes = Field(
        ge=2**28,
        le=2**63 - 1,
        description="host memory of each node for Ray: objects, in /dev/shm, and processes. The host memory for "
        "offload is reduced by it",
    )


class Data(Section):
    """Where documents come from."""

    name: str
    path: _Path | tuple[_Path, ...] = Field(
        description="a folder, a file, a glob, a URL, PREFIX of a token file, `stdlib` or `stdlib-lines`: Python's "
        "standard library; or a list of them",
    )
    format: _Format
    pattern: str = Field(description="glob that selects a folder's files to read as documents")
    separator: _Separator | None = Field(
        examples=["<|endoftext|>"],
        description="text between the documents of a file of a folder; null: a file is one document",
    )
    field: str = Field(
        description="field or column with the text, token ids, or messages of a chat; or PROMPT+ANSWER, two fields; or "
        "`alpaca` or `prompt_completion`, for these shapes of rows"
    )
    encoding: _Encoding = Field(description="`bytes` also reads files that are not UTF-8")
    transform: tuple[Step, ...] = Field(
        examples=[_TRANSFORM],
        description="what becomes of each document before training: a list of steps, each {drop: {shorter: N, longer: "
        "N}}, {truncate: {tokens: N}}, {split: {tokens: N}} or {chat: {}}",
    )
    sources: dict[Annotated[str, Field(pattern=SOURCE_NAME)], Source] = Field(
        max_length=1024,
        examples=["{web: {path: web.jsonl}, code: {path: code.jsonl}}"],
        description="sources to mix, by name; each has the keys that differ from data.*: path, format, pattern, "
        "separator, field, encoding, transform, exhausted",
    )
    mix: tuple[Segment, ...] = Field(
        examples=["{web: 3, code: 1}"],
        description="shares of data.sources in the tokens: {NAME: WEIGHT, ...}, or a list of segments, each "
        "{step: N, weights: {...}, schedule: constant}, or with tokens: N; with the schedule `linear` or `cosine` the "
        "weights of the segment before move to these; with lengths: [LEAST, MOST] other documents wait for a later one",
    )
    exhausted: _Exhausted = Field(
        description="when all documents of a source were used: repeat them, drop the source, or stop the run"
    )
    long: Literal["step", "split"] = Field(
        description="a document longer than batch_tokens forms a step alone, or is split over several steps"
    )
    tokenizer: str = Field(
        min_length=1,
        description="`bytes`, or a file: Hugging Face's tokenizer.json, a SentencePiece model, or a tiktoken file",
    )
    bos: bool | None = Field(description="whether documents begin with BOS; null: as the tokenizer's files specify")
    eos: bool | None = Field(description="whether documents end with EOS; null: yes if the tokenizer has one")
    cache: str | None = Field(description="folder for the tokens of texts; null: bytescale/tokens in the cache folder")
    spool: Bytes = Field(gt=0, le=2**63 - 1, description="maximum bytes of packed documents in data.cache")
    loaders: int | None = Field(
        ge=1,
        le=4096,
        description="processes per host that read and tokenize documents; null: as many as the next steps need, "
        "at most 8, and at most half of its cores",
    )
    quarantine_after: int = Field(
        ge=0,
        le=2**31,
        description="broken documents in a row that stop the run; fewer are skipped and listed; 0: the first stops it",
    )
    runtime: Annotated[str, Choice(RUNTIMES)] = Field(
        description="`local`: each host reads, tokenizes and plans in its own processes; `ray`: on Ray"
    )
    ray: Ray
    validation_share: float = Field(
        ge=0, lt=1, description="fraction of the documents held out for validation, chosen by hash"
    )
    validation_tokens: Tokens = Field(
        ge=0, le=_TOKENS, description="maximum tokens per validation; 0 turns validation off"
    )

    @property
    def paths(self) -> tuple[str, ...]:
        """`path` as a tuple. Empty if every one of `sources` has its own."""
        return (self.path,) if isinstance(self.path, str) else self.path

    @property
    def path_text(self) -> str:
        """`path` as a user writes it: `a.jsonl`, or `[a.jsonl,b.jsonl]`; of a single text, that of the file."""
        # A text that is named alone is read as its folder, with a pattern that is its escaped name (data/choose.py).
        name = re.sub(r"\[([*?[])\]", r"\1", self.pattern)
        if self.format == "folder" and isinstance(self.path, str) and glob.escape(name) == self.pattern:
            return posixpath.join("" if self.path == "." else self.path, name)
        return self.path if isinstance(self.path, str) else f"[{','.join(self.path)}]"

    @property
    def place(self) -> str:
        """The key and the value that name the documents, for messages: `data.path=a` or `data.sources=web, code`."""
        return f"data.sources={', '.join(self.sources)}" if self.sources else f"data.path={self.path_text}"


class Cluster(Section):
    """The machines to plan for or to train on."""

    name: str
    nodes: int = Field(ge=1, le=65536, description="number of machines")
    ranks_per_node: int = Field(ge=1, le=64, description="ranks per machine; a rank is one GPU or one CPU process")
    device_memory: Bytes = Field(
        gt=0,
        le=2**50,
        description="memory of a device in bytes, at least 1MiB, including what CUDA itself uses (docs/memory.md)",
    )
    host_memory: Bytes = Field(
        ge=0,
        le=2**50,
        description="host memory in bytes that one rank may use for offload and for copies of its states; 0, or "
        "at least 1MiB",
    )
    headroom: float = Field(
        ge=0,
        lt=1,
        description="fraction of the device memory and of the host memory that plans leave free",
    )
    hostfile: str | None = Field(description="file in DeepSpeed's hostfile format; it sets the nodes and ranks")
    speeds: Literal["hostfile", "measured"] | tuple[Annotated[int, Field(ge=1, le=100)], ...] = Field(
        examples=["[100,80]"],
        description="percent of full speed of each node: those of the hostfile, those that the run measured before, or "
        "a list",
    )
    calibration: str | None = Field(
        description="file written by `bytescale profile-hardware`; null uses rates from data sheets"
    )


PLANNERS = "engine.planner.planners:PLANNERS"
OPTIMIZERS = "engine.cost.optimizers:OPTIMIZERS"
BASELINE = "static"  # the planner that others are compared with
BEST = "adaptive"  # the planner that hints recommend


class Planner(Section):
    """The assignment of sequences to ranks."""

    name: Annotated[str, Choice(PLANNERS)] = Field(
        description="planning algorithm; naive and balanced follow the paper's algorithms 1 and 2"
    )
    mode: Literal["auto", "free", "lockstep", "pipeline"] = Field(
        description="where ranks wait for each other; free: only in rings and at the end of a step; lockstep: at every "
        "micro-batch; pipeline: between stages; auto: chosen from zero.stage, parallel.pp and parallel.ep"
    )
    max_peers: int = Field(
        ge=1, le=2**20, description="maximum number of ranks that one rank communicates with in a step"
    )


class Optimizer(Section):
    """The update rule, its learning rate and its schedule."""

    name: Annotated[str, Choice(OPTIMIZERS)]
    lr: float = Field(gt=0, le=1e30, description="learning rate after the warm-up")
    min_lr_ratio: float = Field(ge=0, le=1, description="final learning rate as a fraction of optimizer.lr")
    warmup_steps: int = Field(ge=0, le=_STEPS, description="steps of linear warm-up of the learning rate")
    betas: tuple[float, float] = Field(
        examples=["[0.9,0.95]"], description="AdamW's two betas; SGD uses the first one as its momentum"
    )
    eps: float = Field(gt=0, le=1, description="AdamW's epsilon")
    weight_decay: float = Field(ge=0, le=1000, description="weight decay, applied to matrices only")
    clip_norm: float = Field(ge=0, le=1e12, description="maximum gradient norm over all ranks; 0 turns clipping off")
    on_host: bool = Field(
        description="CPU offload of the optimizer: moments and fp32 master weights are stored and updated there"
    )


class Zero(Section):
    """Sharding of the model states over all ranks."""

    stage: Literal[1, 2, 3] = Field(
        description="ZeRO-1 shards optimizer states, ZeRO-2 also gradients, ZeRO-3 also weights"
    )
    weights_on_host: bool = Field(description="stage 3 only: keep a rank's partition of the weights on the host")


class Offload(Section):
    """Activation offload."""

    ratio: Literal["auto"] | float = Field(
        description="upper bound on the fraction of a micro-batch's activations that is offloaded to the host, 0 to 1; "
        "auto: as much as fits in host memory"
    )


class Lengths(Section):
    """Where `plan` and `simulate` take document lengths from: the recipe's data, a named mix, or a file."""

    name: Literal["data", "github", "byted", "lognormal", "equal", "file"]
    path: str | None = Field(description="file with one length per line, for lengths=file")
    mean: float = Field(gt=0, le=_TOKENS, description="mean of the `lognormal` lengths, in tokens")
    sigma: float = Field(gt=0, le=10, description="sigma of `lognormal`")
    max: Tokens = Field(ge=1, le=_TOKENS, description="maximum length of a document in a mix, in tokens; `equal`: each")


class Parallel(Section):
    """Degrees of the other kinds of parallelism."""

    tp: int = Field(ge=1, le=2**16, description="degree of tensor parallelism")
    pp: int = Field(ge=1, le=2**16, description="degree of pipeline parallelism (stages)")
    stages: Literal["auto"] | tuple[PositiveInt, ...] = Field(
        description="layers of each stage, 1 or more, such as [20,20,20,20]; auto: stages whose linear layers take "
        "equal time",
        examples=["[20,20,20,20]"],
    )
    ep: int = Field(
        ge=1, le=2**16, description="degree of expert parallelism: HDP ranks that share the experts of each layer"
    )


class Slurm(Section):
    """What `--launcher slurm` asks sbatch for; null leaves an option out."""

    partition: str | None = Field(pattern=WORD, description="partition of the job")
    account: str | None = Field(pattern=WORD, description="account that is charged for the job")
    qos: str | None = Field(pattern=WORD, description="quality of service of the job")
    time: str | None = Field(
        pattern=r"^(\d+-)?\d+(:\d\d){0,2}$",
        examples=["24:00:00"],
        description="time limit; 2-12 is 2 days and 12 hours",
    )
    grace: int = Field(
        ge=1, le=65535, description="seconds before the time limit at which the run saves a checkpoint and is requeued"
    )
    extra: tuple[str, ...] = Field(
        examples=['["--mem=0"]'],
        description="more options of sbatch; whole nodes are requested unless these request a part of one",
    )


class Kubernetes(Section):
    """What `--launcher k8s` writes into the manifest of the job."""

    image: str | None = Field(
        pattern=IMAGE,
        examples=["registry/bytescale:1"],
        description="container image in which `bytescale` is installed",
    )
    claim: str | None = Field(
        pattern=DNS_NAME, examples=["training"], description="name of the PersistentVolumeClaim that all pods share"
    )
    mount: str = Field(
        pattern=r"^/",
        examples=["/shared"],
        description="where pods see k8s.claim; relative paths of the config start there",
    )
    namespace: str | None = Field(pattern=DNS_LABEL, description="namespace of the job; null: that of kubectl")
    grace: int = Field(ge=1, le=65535, description="seconds in which a pod that is terminated saves a checkpoint")


class Config(Section):
    """The complete config of a recipe."""

    recipe: str = Field(description="name of the recipe")
    context: Tokens = Field(ge=1, le=_TOKENS, description="maximum length of a sequence; longer documents are split")
    capacity: Tokens = Field(
        ge=1,
        le=_TOKENS,
        description="maximum tokens per rank in one micro-batch; offload permits more of a long sequence",
    )
    batch_tokens: Tokens = Field(
        ge=1, le=_TOKENS, description="maximum tokens of a step; a longer document forms a step alone"
    )
    dtype: Literal["bf16", "fp32", "fp64"] = Field(
        description="bf16 trains with fp32 master weights; fp64 is for tests"
    )
    linear_dtype: Literal["same", "fp8"] = Field(
        description="products of attention's projections and of dense SwiGLU layers: `same` computes them in `dtype`; "
        "`fp8` in FP8 with one scale per tensor, which needs dtype=bf16 and, on a GPU, compute capability 8.9 or more"
    )
    recompute: Literal["none", "layer", "layer_keep_attention"] = Field(
        description="what to recompute in the backward pass: nothing, each layer, or each layer except attention"
    )
    mlp_tile: Tokens = Field(
        ge=0,
        description="compute SwiGLU in tiles of this many tokens, recomputed in the backward pass; 0 disables tiling",
    )
    compile: Literal["auto", "always", "never"] = Field(
        description="torch.compile for the pointwise parts of layers; `auto` means on GPUs only"
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
    slurm: Slurm
    k8s: Kubernetes
