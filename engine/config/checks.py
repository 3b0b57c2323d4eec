"""Rules between keys. Each rule returns its problem, or None."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from engine.config import keys, mesh_checks, tree
from engine.config.explain.spelling import did_you_mean
from engine.config.schema import OPTIMIZERS, Config, Rope
from engine.config.secret import has_secret
from engine.config.transform import TRANSFORMS
from engine.config.units import counted
from engine.errors import Problem
from engine.family.families import FAMILIES
from engine.tables import imported

LEAST_MEMORY = 2**20  # bytes of a device; less is a number without its unit
_MAX_GIB = 1024  # a number of bytes up to this is meant in GiB
_MAX_WEIGHTS = 2**48  # maximum weights of a model: with more, bytes and FLOPs overflow 64 bits

_HAS_FP8 = "engine.cost.datasheets:has_fp8"  # its package imports this one
URL_EXAMPLES = "for example s3://bucket/run, gs://bucket/run or file:///mnt/run"

Rule = Callable[[Config], Problem | None]
_RULES: list[Rule] = [*mesh_checks.RULES]


def _rule(function: Rule) -> Rule:
    """Register a rule. Its name is the condition; rules run in the order of this file."""
    _RULES.append(function)
    return function


def check(config: Config) -> list[Problem]:
    """Run all rules and return the problems found. Memory is checked by engine/fit/check.py instead."""
    found = [rule(config) for rule in _RULES]
    return [problem for problem in found if problem is not None]


def check_part(config: Config, wrong: Sequence[Problem]) -> list[Problem]:
    """Run the rules on a config without its `wrong` keys (`validate.right_part`); skip rules that read a wrong key."""
    missing = {keys.leaf_of(str(problem.key)).rsplit(".", 1)[-1] for problem in wrong}
    found = []
    for rule in _RULES:
        try:
            found.append(rule(config))
        except AttributeError as error:
            if error.name not in missing:  # a bug in the rule
                raise
    return [problem for problem in found if problem is not None]


@_rule
def urls_have_no_secrets(config: Config) -> Problem | None:
    """A run folder has the config, and people show it to others."""

    def strings(value: object, key: str) -> Iterator[tuple[str, str]]:
        if isinstance(value, dict):
            for name, inner in value.items():
                yield from strings(inner, f"{key}.{name}" if key else str(name))
        elif isinstance(value, list):
            for inner in value:
                yield from strings(inner, key)
        elif isinstance(value, str):
            yield key, value

    for key, text in strings(config.model_dump(mode="json"), ""):
        if has_secret(text):
            return _shown_secret(key)
    return None


def _shown_secret(key: str) -> Problem:
    message = "is a URL with a password, a token or a signature, which the run folder would show"
    hint = "remove it; fsspec also finds it in the environment, for example by AWS_PROFILE, or in its config"
    return Problem(message, key, hint)


@_rule
def best_checkpoints_have_validation(config: Config) -> Problem | None:
    """Without a validation loss no checkpoint is the best."""
    if not config.run.keep_best or config.data.validation_tokens:
        return None
    hint = "set data.validation_tokens, or run.keep_best=0"
    return Problem("needs a validation loss, and data.validation_tokens is 0", "run.keep_best", hint)


@_rule
def remote_folder_is_a_url(config: Config) -> Problem | None:
    """Checkpoints are copied to a URL. `urls_have_no_secrets` reports one with a secret."""
    remote = config.run.remote
    return None if remote is None or has_secret(remote) else url_problem(remote, "run.remote")


def url_problem(url: str, key: str) -> Problem | None:
    """The reason why a value cannot be the URL of a folder; None if it can."""
    if has_secret(url):
        return _shown_secret(key)
    protocol, found, rest = url.rpartition("://")
    if found and protocol and rest.strip("/"):
        return None
    return Problem("is not the URL of a folder", key, URL_EXAMPLES)


@_rule
def loaders_of_ray_are_a_range(config: Config) -> Problem | None:
    found = config.data.ray.loaders
    if found is None or found[0] <= found[1]:
        return None
    least, most = found
    return Problem("has more processes at least than at most", "data.ray.loaders", f"data.ray.loaders=[{most},{least}]")


@_rule
def address_of_ray_has_a_port(config: Config) -> Problem | None:
    address = config.data.ray.address
    if address is None or 0 < int(address.rpartition(":")[2]) < 1 << 16:
        return None
    return Problem(f"has a port that is not between 1 and 65,535: {address}", "data.ray.address", "6379 is Ray's own")


@_rule
def device_memory_has_a_unit(config: Config) -> Problem | None:
    return _tiny_memory(config.cluster.device_memory, "cluster.device_memory", "at least 1 MiB")


@_rule
def host_memory_has_a_unit(config: Config) -> Problem | None:
    """0 is no memory for offload and copies."""
    size = config.cluster.host_memory
    return _tiny_memory(size, "cluster.host_memory", "0 or at least 1 MiB") if size else None


def _tiny_memory(size: int, key: str, bound: str) -> Problem | None:
    """The problem with a memory below LEAST_MEMORY, such as 80 bytes where 80 GiB are meant; None if it is larger."""
    if size >= LEAST_MEMORY:
        return None
    example = f"{size}GiB" if size <= _MAX_GIB else "80GiB"
    return Problem(f"must be {bound}, not {counted(size, 'byte')}", key, f"give it a unit, for example {key}={example}")


@_rule
def weights_can_be_counted(config: Config) -> Problem | None:
    """The model is small enough that its bytes and FLOPs fit in 64 bits, as later checks assume."""
    model = config.model
    weights = model.layers * model.hidden * (model.hidden + model.experts * model.ffn) + model.hidden * model.vocab
    if weights <= _MAX_WEIGHTS:
        return None
    message = f"{model.hidden} gives, with these layers, experts and vocabulary, more weights than ByteScale supports"
    return Problem(message, "model.hidden", "choose a smaller model")


@_rule
def kv_heads_divide_heads(config: Config) -> Problem | None:
    heads, kv_heads = config.model.heads, config.model.kv_heads
    if heads % kv_heads == 0:
        return None
    hint = f"for example model.kv_heads={heads}"
    return Problem(f"{kv_heads} does not divide model.heads={heads}", "model.kv_heads", hint)


@_rule
def head_size_is_even(config: Config) -> Problem | None:
    """Rotary embedding rotates pairs of elements, so the head size must be even."""
    hidden, heads, size = config.model.hidden, config.model.heads, config.model.head_size
    if size is not None:
        if size * heads == hidden:  # one spelling, because models are compared by their keys
            message = f"{size} is model.hidden={hidden} / model.heads={heads}, as without this key"
            return Problem(message, "model.head_size", "set model.head_size=null")
        hint = f"for example model.head_size={size + 1}"
        odd = Problem(f"{size} is odd; rotary embedding needs an even head size", "model.head_size", hint)
        return odd if size % 2 else None
    if hidden % (2 * heads) == 0:
        return None
    message = f"{hidden} is not a multiple of 2 x model.heads={heads}; rotary embedding needs an even head size"
    return Problem(message, "model.hidden", f"for example model.hidden={-(-hidden // (2 * heads)) * 2 * heads}")


@_rule
def betas_are_below_one(config: Config) -> Problem | None:
    if all(0 <= beta < 1 for beta in config.optimizer.betas):
        return None
    betas = list(config.optimizer.betas)
    return Problem(
        f"must be at least 0 and less than 1, not {betas}", "optimizer.betas", "for example optimizer.betas=[0.9,0.95]"
    )


@_rule
def optimizer_takes_parts_of_matrices(config: Config) -> Problem | None:
    if not imported(OPTIMIZERS)[config.optimizer.name].whole_matrices:
        return None
    message = f"{config.optimizer.name} needs whole matrices, but ZeRO gives each rank a part of the flattened ones"
    return Problem(message, "optimizer.name", "choose another optimizer")


@_rule
def offload_ratio_is_a_fraction(config: Config) -> Problem | None:
    ratio = config.offload.ratio
    if ratio == "auto" or 0 <= ratio <= 1:
        return None
    hint = "set offload.ratio=auto, or a fraction such as offload.ratio=0.5"
    return Problem(f"must be auto or from 0 to 1, not {ratio:g}", "offload.ratio", hint)


@_rule
def experts_fit_the_family(config: Config) -> Problem | None:
    name, experts = config.model.family, config.model.experts
    family, other = FAMILIES[name], next(one.name for one in FAMILIES.values() if one.accepts(experts))
    if family.accepts(experts):
        return None
    if family.experts:
        message, hint = f"{name} has experts, so at least 2", "set model.experts=2 or more"
    else:
        message, hint = f"{name} has no experts, not {experts}", "set model.experts=1"
    return Problem(message, "model.experts", f"{hint}, or a family such as model.family={other}")


@_rule
def probabilities_are_divided_as_the_family_does(config: Config) -> Problem | None:
    """Only families whose config.json has a key for it let a config choose."""
    if config.model.norm_top_k or "norm_top_k" in FAMILIES[config.model.family].keys:
        return None
    message = f"{config.model.family} divides the probabilities of a token's experts by their sum"
    return Problem(message, "model.norm_top_k", "set model.norm_top_k=true")


@_rule
def top_k_is_at_most_experts(config: Config) -> Problem | None:
    experts, top_k = config.model.experts, config.model.top_k
    if top_k <= experts:
        return None
    return Problem(f"{top_k} is more than model.experts={experts}", "model.top_k", f"set model.top_k={experts} or less")


# Required and optional parameters of each kind of rotary scaling
_ROPE = {
    "none": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
    ),
}
_LLAMA_3_1 = {
    "factor": "8",
    "original_max_position_embeddings": "8K",
    "low_freq_factor": "1",
    "high_freq_factor": "4",
}


@_rule
def rope_parameters_match_kind(config: Config) -> Problem | None:
    """All parameters that model.rope.kind requires are set, and no parameters of other kinds."""
    rope = config.model.rope
    kind, given = rope.kind, [name for name in Rope.model_fields if name != "kind" and getattr(rope, name) is not None]
    needs, may = _ROPE[kind]
    missing = [name for name in needs if name not in given]
    if missing:
        hint = f"for example {' '.join(f'model.rope.{name}={_LLAMA_3_1[name]}' for name in missing)}"
        message = f"{kind} needs parameters that are not set: {', '.join(missing)}"
        return Problem(message, "model.rope.kind", hint)
    extra = [name for name in given if name not in needs + may]
    if extra:
        takers = [other for other, names in _ROPE.items() if extra[0] in sum(names, ())]
        hint = f"set model.rope.kind={' or '.join(takers)}, or remove it"
        return Problem(f"is not a parameter of model.rope.kind={kind}", f"model.rope.{extra[0]}", hint)
    return None


@_rule
def rope_bounds_are_ordered(config: Config) -> Problem | None:
    """The two bounds on rotations are in order; DeepSeek's two mscale factors are set together."""
    if rope_parameters_match_kind(config) is not None:
        return None
    rope = config.model.rope
    low, high = rope.low_freq_factor, rope.high_freq_factor
    if low is not None and high is not None and low >= high:
        message = f"must be more than model.rope.low_freq_factor={low:g}, not {high:g}"
        return Problem(message, "model.rope.high_freq_factor", "Llama 3.1 uses 1 and 4")
    fast, slow = rope.beta_fast or 32.0, rope.beta_slow or 1.0
    if slow >= fast:
        message = f"must be more than model.rope.beta_slow={slow:g}, not {fast:g}"
        return Problem(message, "model.rope.beta_fast", "YaRN's defaults are 32 and 1")
    if (rope.mscale is None) != (rope.mscale_all_dim is None):
        missing = "mscale" if rope.mscale is None else "mscale_all_dim"
        return Problem("is not set", f"model.rope.{missing}", "set both mscale and mscale_all_dim, or neither")
    return None


@_rule
def lengths_path_goes_with_file(config: Config) -> Problem | None:
    """lengths.path is set if and only if lengths=file."""
    name, path = config.lengths.name, config.lengths.path
    if name == "file" and path is None:
        return Problem("is not set", "lengths.path", "set lengths.path=FILE, with one length per line")
    if name != "file" and path is not None:
        return Problem(f"is not used with lengths={name}", "lengths.path", "also set lengths=file, or remove it")
    return None


@_rule
def every_source_has_documents_of_its_own(config: Config) -> Problem | None:
    """A source has a path, or another pattern than the other sources. A token file is one PREFIX."""
    data = config.data
    if not data.sources and not data.path:
        return Problem("is an empty list", "data.path", "set data.path to a file, a folder or a glob")
    for name, source in {"": None, **data.sources}.items():
        key = f"data.sources.{name}.path" if source else "data.path"
        path = (source and source.path) or data.path
        if source and not source.path and (source.path == () or source.pattern is None or not data.path):
            return Problem("is not set", key, f"set {key}=..., a file, a folder or a glob")
        if ((source and source.format) or data.format) == "tokens" and not isinstance(path, str) and path:
            message = f"a token file is one PREFIX, not {len(path)}"
            return Problem(message, key, "name them as sources, each with a weight: data.sources.NAME.path=PREFIX")
        if ((source and source.format) or data.format) == "tokens" and isinstance(path, str) and "://" in path:
            return Problem("is a URL, and token files are local", key, "copy PREFIX.bin and PREFIX.idx into a folder")
    return None


@_rule
def separators_are_of_folders(config: Config) -> Problem | None:
    """Files of other formats mark the ends of documents."""
    data = config.data
    named = {"data": data.format if data.separator and not data.sources else "folder"}
    named |= {f"data.sources.{name}": one.format or data.format for name, one in data.sources.items() if one.separator}
    for section, form in named.items():
        if form != "folder":
            message = f"divides the texts of data=folder; files in the format {form} mark the ends of documents"
            return Problem(message, f"{section}.separator", "remove it")
    return None


@_rule
def transforms_can_be_applied(config: Config) -> Problem | None:
    """They are for documents that are tokenized; steps that need a text come before those that leave only its ids."""
    data = config.data
    given = {"data": (data.format if not data.sources else "", data.transform)}
    given |= {
        f"data.sources.{name}": (one.format or data.format, one.transform)
        for name, one in data.sources.items()
        if one.transform
    }
    for section, (form, steps) in given.items():
        key, to_ids = f"{section}.transform", ""
        if steps and form == "tokens":
            message, hint = "is for texts, and a token file has tokens", "remove it; `bytescale data pack` applies it"
            return Problem(message, key, hint)
        for name in (name for step in steps for name in step):
            traits = imported(TRANSFORMS)[name]
            if traits.of_texts and to_ids:
                return Problem(f"{name} needs the text, which {to_ids} does not leave", key, f"write {name} first")
            to_ids = to_ids or (name if traits.to_ids else "")
    return None


@_rule
def mix_has_the_names_of_sources(config: Config) -> Problem | None:
    """data.mix is set for several sources. It has a weight for each, and no others."""
    sources, mix = config.data.sources, config.data.mix
    if not sources and mix:
        example = next(iter(mix[0].weights), "web")
        return Problem("needs data.sources", keys.MIX, f"name them: data.sources.{example}.path=..., or remove it")
    if not mix:
        example = "{" + ", ".join(f"{name}: 1" for name in sources) + "}"
        problem = Problem("is not set", keys.MIX, f"give each source a weight, for example 'data.mix={example}'")
        return problem if len(sources) > 1 else None
    named = list(dict.fromkeys(name for segment in mix for name in segment.weights))
    unknown = [name for name in named if name not in sources]
    if unknown:
        hint = did_you_mean(unknown[0], sources, f"data.sources has {', '.join(sources)}")
        return Problem(f"unknown source: {unknown[0]}", keys.MIX, hint)
    missing = [name for name in sources if name not in named]
    if missing:
        return Problem(f"has no weight for {missing[0]}", keys.MIX, f"add {missing[0]}: 1, or 0 not to train on it")
    return None


@_rule
def segments_of_mix_are_in_order(config: Config) -> Problem | None:
    """Segments have weights, and start in ascending order, at steps or at tokens; the first at 0."""
    before, units = -1, set[str]()
    for number, segment in enumerate(config.data.mix):
        place = f"segment {number + 1}"
        given = [unit for unit in ("step", "tokens") if getattr(segment, unit) is not None]
        units |= {*given} if segment.start else set()
        if not any(segment.weights.values()):
            return Problem(f"{place} has no weight above 0", keys.MIX, "give a source a weight above 0")
        if len(given) == 2:
            return Problem(f"{place} has both step and tokens", keys.MIX, "remove one of them")
        moves = segment.schedule != "constant"
        if number == 0 and (segment.start or moves):
            word = (
                f"{segment.schedule}, but there is no segment before it" if moves else f"at {segment.start:,}, not at 0"
            )
            return Problem(f"{place} is {word}", keys.MIX, "the first segment has weights from the start on")
        if number and not given:
            return Problem(f"{place} has neither step nor tokens", keys.MIX, f"{{step: 1000, weights: ...}} in {place}")
        if segment.lengths is not None and segment.lengths[0] > segment.lengths[1]:
            least, most = segment.lengths
            return Problem(
                f"{place} has no lengths from {least:,} to {most:,}", keys.MIX, "write lengths: [LEAST, MOST]"
            )
        if len(units) == 2:
            return Problem(f"{place} uses {given[0]}, others do not", keys.MIX, "use step in all segments, or tokens")
        if segment.start <= before:
            hint = "write segments in the order of their starts"
            return Problem(f"{place} starts at {segment.start:,}, not after {before:,}", keys.MIX, hint)
        before = segment.start
    return None


@_rule
def weights_on_host_needs_zero3(config: Config) -> Problem | None:
    """Weights can stay on the host only with ZeRO-3, which gathers them when they are used."""
    if config.zero.stage == 3 or not config.zero.weights_on_host:
        return None
    message = f"needs zero.stage=3, not {config.zero.stage}"
    # With pipeline stages zero.stage=3 is not an option (`mode_goes_with_stages`).
    hint = (
        "set zero.stage=3 or zero.weights_on_host=false"
        if config.parallel.pp == 1
        else "set zero.weights_on_host=false"
    )
    return Problem(message, "zero.weights_on_host", hint)


@_rule
def fp8_goes_with_bf16(config: Config) -> Problem | None:
    """What FP8 products do not compute is in bf16; of fp32 they would lose most digits."""
    if config.linear_dtype != "fp8" or config.dtype == "bf16":
        return None
    message = f"fp8 cannot be combined with dtype={config.dtype}"
    return Problem(message, "linear_dtype", "set dtype=bf16, or linear_dtype=same")


@_rule
def fp8_matrices_are_aligned(config: Config) -> Problem | None:
    """GPUs multiply FP8 matrices whose rows begin at multiples of 16 bytes, on every device of a tp group."""
    model, tp = config.model, config.parallel.tp
    head = model.head_size or model.hidden // model.heads
    widths = {
        "model.hidden": model.hidden,
        "model.heads": model.heads * head // tp,
        "model.kv_heads": model.kv_heads * head // tp,
    }
    if model.experts == 1:  # experts stay in bf16
        widths["model.ffn"] = model.ffn // tp
    wrong = [name for name, width in widths.items() if width % 16]
    if config.linear_dtype != "fp8" or not wrong:
        return None
    message = f"fp8 needs matrices whose sides are multiples of 16, and {wrong[0]} gives one of {widths[wrong[0]]}"
    on = f" on each of {tp} devices" if tp > 1 and wrong[0] != "model.hidden" else ""
    ways = ["linear_dtype=same"]
    if wrong == ["model.ffn"]:
        step = 16 * tp
        ways.insert(0, f"model.ffn={max((model.ffn + step // 2) // step, 1) * step}")
    hint = f"set {' or '.join(ways)}" + (", or a smaller parallel.tp" if on else "")
    return Problem(message + on, "linear_dtype", hint)


@_rule
def gpus_have_fp8(config: Config) -> Problem | None:
    """By the data sheet of a preset. On a cluster with a calibration the ranks ask their GPUs instead."""
    cluster = config.cluster
    if config.linear_dtype != "fp8" or cluster.calibration is not None or imported(_HAS_FP8)(cluster.name):
        return None
    message = f"fp8 needs GPUs that multiply FP8, and those of cluster={cluster.name} do not"
    return Problem(message, "linear_dtype", "set linear_dtype=same, or another cluster, for example cluster=h100x8")


@_rule
def cluster_speed_is_known(config: Config) -> Problem | None:
    """The cluster is a preset, whose speed is known from a data sheet, or it has a calibration."""
    cluster, presets = config.cluster, tree.groups()["cluster"]
    if cluster.name in presets or cluster.calibration is not None:
        return None
    hint = "set cluster.calibration=FILE, written by `bytescale profile-hardware` on that machine"
    message = f"{cluster.name} has no data sheet, so its speed is unknown; presets: {', '.join(presets)}"
    return Problem(message, "cluster.name", hint)


@_rule
def slurm_time_is_longer_than_grace(config: Config) -> Problem | None:
    """Slurm signals a job slurm.grace seconds before its time is over: at once, if it has no more time than that."""
    time, grace = config.slurm.time, config.slurm.grace
    if time is None or not 0 < _seconds(time) <= grace:  # without limit if 0
        return None
    hint = "set a longer slurm.time, for example slurm.time=24:00:00, or a smaller slurm.grace"
    return Problem(f"must be longer than slurm.grace={grace} seconds, not {time}", "slurm.time", hint)


def _seconds(time: str) -> int:
    """Read a time limit of Slurm: D-H, D-H:M, D-H:M:S, H:M:S, M:S or M."""
    days, dash, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if not dash and len(parts) < 3:
        parts = [0, *parts]
    hours, minutes, seconds = [*parts, 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
