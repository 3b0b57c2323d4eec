"""A rank's model states in bytes: weights, gradients and optimizer under ZeRO, on the device and on its host."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from engine.config import schema
from engine.cost.flops import layer_weights

ELEMENT = {"bf16": 2, "fp32": 4, "fp64": 8}
_BUCKET = 1 << 26  # elements that are reduced over the ranks at once; a larger parameter goes alone
_SUB_GROUP = 10**9  # elements of stage 3's gradients, or a few more, that have one tensor on the host
_REDUCED = 500_000_000  # elements of BF16_Optimizer's gradients that are joined; more are reduced as they lie


def element_bytes(dtype: str) -> tuple[int, int]:
    """Return b and w."""
    return ELEMENT[dtype], max(ELEMENT[dtype], 4)


def parameters(model: schema.Model) -> int:
    """Return the number of parameters: matrices, norms, and the embedding where the head does not share it."""
    norms = (2 * model.layers + 1) * model.hidden
    matrices = model.layers * layer_weights(model, experts=model.experts)
    return matrices + norms + (1 if model.tied else 2) * model.hidden * model.vocab


def bucket_elements(model: schema.Model, devices: int = 1) -> int:
    """Return the elements of DeepSpeed's buffer for gradients on their way, on each of a rank's devices."""
    return min(-(-parameters(model) // devices), _BUCKET)


@dataclass(frozen=True)
class Held:
    """What a device holds whatever its micro-batch, in bytes by item; `host` are those that wait on the host."""

    parameters: int
    gradients: int
    optimizer: int
    gather_buffers: int  # of ZeRO: layers that are gathered, and gradients on their way
    host: int

    @property
    def device(self) -> int:
        """Return the bytes on the device."""
        return sum(getattr(self, field.name) for field in fields(self)) - self.host


def states(config: schema.Config, ranks: int) -> Held:
    """Return what each device of one of `ranks` HDP ranks holds whatever its micro-batch, by DeepSpeed's optimizer.

    Of P parameters: stage 1 in bf16 runs BF16_Optimizer: 2P weights, 4P fp32 gradients, 4P n / ranks of optimizer
    (`optimizer_tensors`: n). Other dtypes: weights and gradients, n tensors in the wider dtype over all ranks, and a
    bucket. Stage 2 shards gradients too, stage 3 also weights, of which two layers, or the head, are whole at a time.
    With an optimizer on the host (never BF16_Optimizer) the n tensors wait there, and gradients as `_on_host` says.
    Weights there are pinned one by one, then joined; PyTorch keeps the former for later.
    Reductions of stages 2 and 3 copy the bucket (`_copies`); stage 2 adds a new share of gradients to the old one,
    unless they are narrower. On CPUs gloo lays out once more what it gathers.
    """
    model, stage, devices = config.model, config.zero.stage, _devices(config)
    b, w = element_bytes(config.dtype)
    count, share = -(-parameters(model) // devices), -(-parameters(model) // (devices * ranks))
    bucket = 0 if _unwritten(config) else _bucket(config)
    if stage > 1 and not _one_bucket(
        config
    ):  # the copies of a smaller model's come when activations are gone: `closing_bytes`
        bucket += _copies(config) + (w * share if stage == 2 and b == w and not config.optimizer.on_host else 0)
    here = Held(
        parameters=b * (count if stage < 3 else share),
        gradients=w * (count if stage == 1 else share),
        optimizer=w * share * optimizer_tensors(config.optimizer),
        gather_buffers=bucket + (_gathered(config) if stage == 3 else 0),
        host=0,
    )
    if config.optimizer.on_host:
        here = _on_host(here, config, share)
    if config.zero.weights_on_host:
        away = here.parameters if on_cpus(config) else _pinned(config, here.parameters, several=here.parameters)
        here = replace(here, parameters=0, host=here.host + away)
    return here


def is_bf16_optimizer(config: schema.Config) -> bool:
    """Return whether DeepSpeed runs its BF16_Optimizer."""
    return config.dtype == "bf16" and config.zero.stage == 1 and not config.optimizer.on_host


def optimizer_tensors(optimizer: schema.Optimizer) -> int:
    """Return how many an optimizer has: master weights, and AdamW's two moments or SGD's momentum."""
    return 3 if optimizer.name == "adamw" else 2 if optimizer.betas[0] else 1


def update_bytes(optimizer: schema.Optimizer, dtype: str) -> int:
    """Return what an update reads and writes of a parameter: its optimizer's tensors, and its weight."""
    b, w = element_bytes(dtype)
    return 2 * optimizer_tensors(optimizer) * w + b


def _on_host(here: Held, config: schema.Config, share: int) -> Held:
    """Return the states with an optimizer on the host, which has a copy of a rank's share of the gradients for it.

    Gradients are added up there in stage 3, and in stage 2 unless they are narrower than their sum: that stays on the
    device. In stages 1 and 2 updated weights come back through a copy, and the largest parameter has a buffer on either
    side. All but the moments, and stage 3's master weights, is pinned.
    """
    model, stage = config.model, config.zero.stage
    b, w = element_bytes(config.dtype)
    there = here.gradients if stage == 3 or (stage == 2 and b == w) else 0
    largest = -(-largest_elements(model) // _devices(config)) * b if stage < 3 else 0
    pinned, several, plain = [share * w, share * w, share * b, largest], there, here.optimizer - share * w
    if stage == 3:
        pinned, several, plain = [there, share * w], 0, here.optimizer
        if share > _SUB_GROUP:
            pinned, several = [there], share * w
    return replace(
        here,
        gradients=here.gradients - there,
        optimizer=0,
        gather_buffers=here.gather_buffers + largest,
        host=plain + _pinned(config, *pinned, several=several),
    )


def _pinned(config: schema.Config, *tensors: int, several: int = 0) -> int:
    """Return what the host holds for pinned tensors of so many bytes each, and for several of so many in all.

    PyTorch takes a power of two for each, so at most twice as much for several. On CPUs nothing is pinned.
    """
    if on_cpus(config):
        return sum(tensors) + several
    return sum(1 << (size - 1).bit_length() for size in tensors if size) + 2 * several


def passing_bytes(config: schema.Config) -> int:
    """Return what grows through each backward pass as saved activations go, on each of a rank's devices: a rank needs
    the larger, not their sum.

    BF16_Optimizer's bf16 gradients, until they are added to the fp32 ones. On CPUs stage 2's bucket.
    """
    if is_bf16_optimizer(config):
        return -(-2 * parameters(config.model) // _devices(config))
    return _bucket(config) if config.zero.stage == 2 and _unwritten(config) else 0


def closing_bytes(config: schema.Config, ranks: int) -> int:
    """Return what the end of a step holds beside the states on each of a rank's devices, when its activations are gone.

    BF16_Optimizer copies all gradients to reduce them, unless they are more than a bucket: then nothing is joined.
    Others join a rank's gradients for the update, in stages 2 and 3 unless that is on the host; these copy before that
    a bucket that holds the whole model; of what stage 3 gathers there is the embedding then, and its gradient. Stage 1
    copies a parameter that is larger than its bucket. On CPUs that is written by then.
    """
    stage, (b, w) = config.zero.stage, element_bytes(config.dtype)
    devices = _devices(config)
    count, share = -(-parameters(config.model) // devices), -(-parameters(config.model) // (devices * ranks))
    if is_bf16_optimizer(config):
        return w * count if count <= _REDUCED else 0
    bucket = _bucket(config) if _unwritten(config) else 0
    if stage == 1:
        largest = -(-largest_elements(config.model) // devices)
        return bucket + w * max(share, largest if largest > _BUCKET else 0)
    if not _one_bucket(config):
        return 0 if config.optimizer.on_host else w * share
    ends = 2 * -(-head_elements(config.model) // devices) * b - _gathered(config) if stage == 3 else 0
    return max(0, bucket + _copies(config) + ends)


def filling_bytes(config: schema.Config, ranks: int) -> int:
    """Return the gradients, of those in `states`, that are not there when the last layer of a rank's first micro-batch
    of a step is differentiated.

    They fill as its saved activations go. BF16_Optimizer and stage 3 keep theirs from step to step, and so does, from
    its first bucket on, stage 2; in stage 1 the head's and that layer's are there.
    """
    if config.zero.stage == 3 or is_bf16_optimizer(config) or (config.zero.stage == 2 and not _one_bucket(config)):
        return 0
    model, gradients = config.model, states(config, ranks).gradients
    if config.zero.stage == 2:
        return gradients
    there = head_elements(model) + layer_weights(model, experts=model.experts)
    return max(0, gradients - -(-there // _devices(config)) * element_bytes(config.dtype)[1])


def coming_bytes(config: schema.Config) -> int:
    """Return what of `states` is not there in a micro-batch's loss: stage 2's bucket comes with the first gradient."""
    return _bucket(config) if config.zero.stage == 2 and not _unwritten(config) else 0


def lone_bytes(config: schema.Config, elements: int) -> int:
    """Return what the gradient of a parameter takes that is larger than a bucket, and reduced alone, in stages 2 and 3:
    itself, and copies of what of it the bucket's do not count."""
    if config.zero.stage == 1 or elements <= _BUCKET:
        return 0
    return elements * element_bytes(config.dtype)[0] + (elements - _BUCKET) * copied_bytes(config)


def largest_elements(model: schema.Model) -> int:
    """Return the elements of the largest parameter: the head, or one of a layer's matrices of all experts."""
    return max(head_elements(model), expert_elements(model))


def expert_elements(model: schema.Model) -> int:
    """Return the elements of a matrix of SwiGLU, or of all experts of a layer, which are one parameter."""
    return model.experts * model.ffn * model.hidden


def head_elements(model: schema.Model) -> int:
    """Return the parameters of the head, as many as the embedding's."""
    return model.hidden * model.vocab


def on_cpus(config: schema.Config) -> bool:
    """Return whether ranks are processes on CPUs: on this machine, and not in a cluster of any name."""
    return config.cluster.name == "local"


def _devices(config: schema.Config) -> int:
    return config.parallel.tp * config.parallel.pp


def _one_bucket(config: schema.Config) -> bool:
    """Return whether DeepSpeed's bucket holds all gradients."""
    return -(-parameters(config.model) // _devices(config)) <= _BUCKET


def _gathered(config: schema.Config) -> int:
    """Return what stage 3 has whole of the weights: two layers or the head, and on CPUs one laid out anew by gloo."""
    model, (b, _) = config.model, element_bytes(config.dtype)
    layer, head = layer_weights(model, experts=model.experts), head_elements(model)
    gathered = max(2 * layer, head) + (max(layer, head) if on_cpus(config) else 0)
    return -(-gathered // _devices(config)) * b


def _bucket(config: schema.Config) -> int:
    """Return DeepSpeed's buffer for gradients on their way, in stage 2 as wide as they are; BF16_Optimizer has none."""
    b, w = element_bytes(config.dtype)
    elements = bucket_elements(config.model, _devices(config))
    return 0 if is_bf16_optimizer(config) else elements * (b if config.zero.stage == 2 else w)


def _copies(config: schema.Config) -> int:
    """Return what a reduction holds beside its bucket in stages 2 and 3."""
    return bucket_elements(config.model, _devices(config)) * copied_bytes(config)


def copied_bytes(config: schema.Config) -> int:
    """Return the copies of an element on its way in stages 2 and 3: one, in stage 2 widened too if it is narrow, and
    on CPUs gloo's own in stage 3."""
    b, w = element_bytes(config.dtype)
    if config.zero.stage == 2:
        return b if b == w else b + w
    return 2 * w if on_cpus(config) else w


def _unwritten(config: schema.Config) -> bool:
    """Return whether the bucket is empty when the backward pass begins, on a CPU, where a page counts once it is
    written: stage 1 reduces at the end of the step; stage 2 fills it in each pass, if it holds the whole model."""
    return on_cpus(config) and (config.zero.stage == 1 or (config.zero.stage == 2 and _one_bucket(config)))
