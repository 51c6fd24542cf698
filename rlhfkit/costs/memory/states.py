"""Bytes of weights, gradients and optimizer states of a run, per GPU.

States of mixed-precision training with Adam are those of Rajbhandari et al. (ZeRO, 2020, arXiv:1910.02054, section
3.1), with what DeepSpeed 0.19.8 and Lightning 2.6.6 hold besides: reduction buckets, gathered weights, flat gradients
of the step. P are trained parameters, R ranks, b bytes of a weight, m bytes of a main weight. With T tensor ranks P are
the parameters of which a rank has numbers, and ZeRO divides each by the R / T ranks that have the same part.
"""

from collections.abc import Sequence

from rlhfkit.costs.memory.parts import HOST, PHASES, TRAINING, MemoryPart
from rlhfkit.costs.model_shape import ModelShape
from rlhfkit.costs.parallelism import on_rank, trained_on_rank
from rlhfkit.costs.run import Run

NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Of a weight of 4 bits: itself, a scale of 8 bits for 64 of them, and one of 32 bits for 256 such scales (QLoRA,
arXiv:2305.14314, section 3)."""


def whole_weight_bytes(run: Run, parameters: float, quantized: float = 0.0) -> float:
    """Bytes of weights that nothing divides, so many of them in 4 bits."""
    return run.precision.weights * (parameters - quantized) + NF4_BYTES * quantized


def weight_bytes(run: Run, parameters: float, quantized: float = 0.0) -> float:
    """Bytes of a model's weights: ``b P``, at ZeRO 3 ``b P / R``; 0 on the GPU with offloaded parameters.

    Frozen models are sharded at stage 3 only. ZeRO 1 and 2 round up to whole flat buffers, which is left out.
    """
    whole = whole_weight_bytes(run, parameters, quantized)
    if run.sharding.stage != 3:
        return whole
    return 0.0 if run.sharding.offload_parameters else whole / run.sharding.shards


def gathered_bytes(run: Run, shape: ModelShape) -> float:
    """Bytes of whole weights that ZeRO 3 gathers meanwhile: at most ``live_parameters``, and all small tensors.

    On a single rank nothing is sharded, and nothing is copied.
    """
    if run.sharding.stage != 3 or run.sharding.shards == 1:
        return 0.0
    parameters = on_rank(shape, shape.parameters, run.sharding.tensor)
    return run.precision.weights * (min(parameters, run.sharding.live_parameters) + shape.small)


def gradient_bytes(run: Run, trained: float) -> float:
    """Bytes of gradients at the end of the backward pass: ``b P``, from ZeRO 2 on the rank's share ``b P / R``."""
    whole = run.precision.weights * trained
    return whole / run.sharding.shards if (run.sharding.stage or 0) >= 2 else whole


def micro_batch_gradient_bytes(run: Run, trained: float) -> float:
    """Bytes of a micro-batch's gradients before they are added to those of earlier ones: at ZeRO 2 ``b P / R``.

    DeepSpeed collects the rank's share there in a buffer of its own; other stages add each gradient at once.
    """
    return run.precision.weights * trained / run.sharding.shards if run.sharding.stage == 2 else 0.0


def bucket_bytes(run: Run, trained: float) -> float:
    """Bytes of buffers in which gradients are reduced.

    DDP: a second copy of all gradients. ZeRO 0: one flat copy, at most 500 million numbers (DeepSpeed's
    ``buffered_allreduce_fallback``). ZeRO 1 and 3: a bucket, whatever the size of the model. ZeRO 2: two, if reduction
    overlaps the backward pass.
    """
    sharding, itemsize = run.sharding, run.precision.weights
    if sharding.stage in (None, 0):
        if sharding.shards == 1:
            return 0.0
        return itemsize * (trained if sharding.stage is None else min(trained, 5e8))
    return itemsize * sharding.bucket * (2 if sharding.stage == 2 and sharding.overlap else 1)


def optimizer_bytes(run: Run, trained: float, state: float | None = None) -> float:
    """Bytes of main weights and Adam's two moments: ``3 m P`` (``2 m P`` without main weights), from ZeRO 1 on ``/ R``.

    From ZeRO 1 on DeepSpeed copies main weights of float32 models too; Lightning's own strategies and ZeRO 0 do not.
    ``state``: bytes per parameter of another optimizer's state, in place of the moments.
    """
    precision, sharding = run.precision, run.sharding
    copied = precision.main_weights != precision.weights or (sharding.stage or 0) >= 1
    numbers = trained / sharding.shards if (sharding.stage or 0) >= 1 else trained
    moments = 2 * precision.main_weights if state is None else state
    return numbers * (moments + (precision.main_weights if copied else 0))


def update_bytes(run: Run, shape: ModelShape) -> float:
    """Bytes that the optimizer's step needs for a moment: gradients as main weights, and the step's temporary tensors.

    With ZeRO the step is on one flat tensor: gradients as main weights if these are wider, which ZeRO 1 and 2 flatten
    before that. Lightning's own strategies and float32 models at stage 0 step tensor by tensor on a CPU, and all at
    once on a GPU (``foreach``).
    """
    precision, sharding = run.precision, run.sharding
    trained, temporary = trained_on_rank(shape, sharding.tensor), run.step_bytes(shape)
    widened = precision.main_weights != precision.weights
    if sharding.stage in (None, 0) and not widened:
        return temporary * (min(shape.largest_tensor, trained) if run.gpu.name == "cpu" else trained)
    numbers = trained / sharding.shards if (sharding.stage or 0) >= 1 else trained
    flat = sharding.stage in (1, 2)
    before = precision.weights if flat and widened else 0.0
    return numbers * (max(temporary, before) + (precision.main_weights if widened or flat else 0.0))


def trained_models(run: Run) -> list[tuple[str, ModelShape]]:
    """Role and shape of each model that has an optimizer."""
    return [("policy", run.policy)] + ([("critic", run.critic.with_scalar_head())] if run.critic else [])


def frozen_models(run: Run) -> list[tuple[str, ModelShape]]:
    """Role and shape of each model that has none."""
    rewards = [run.reward_model, *run.more_reward_models]
    found = [("reference", run.reference)]
    found += [(_numbered("reward model", number), shape) for number, shape in enumerate(rewards, 1)]
    found += [(_numbered("teacher", number), one) for number, one in enumerate([run.teacher, *run.more_teachers], 1)]
    scalar = ("reward model",)
    return [(role, shape.with_scalar_head() if role.startswith(scalar) else shape) for role, shape in found if shape]


def _numbered(role: str, number: int) -> str:
    return role if number == 1 else f"{role} {number}"


def state_parts(run: Run) -> list[MemoryPart]:
    """Weights, gradients and optimizer states of all models, and what is gathered or buffered of them."""
    parts = []
    sharding = run.sharding
    kept = tuple(phase for phase in PHASES if phase != "generate") if run.offload_training else PHASES
    moved = tuple(phase for phase in kept if phase != "sync") if run.offload_training else PHASES
    for role, shape in trained_models(run):
        own = run.of_trained(shape)
        parameters, trained = on_rank(shape, shape.parameters, sharding.tensor), trained_on_rank(shape, sharding.tensor)
        host = HOST if sharding.offload_optimizer else TRAINING
        parts.append(MemoryPart(TRAINING, role, "weights", weight_bytes(run, parameters, shape.quantized), kept))
        if shape.adapters:
            parts.append(MemoryPart(TRAINING, role, "adapters", own.precision.weights * shape.adapters, kept))
        if sharding.stage == 3 and sharding.offload_parameters:
            offloaded = whole_weight_bytes(run, parameters, shape.quantized) / sharding.shards
            parts.append(MemoryPart(HOST, role, "weights", offloaded))
        parts.append(MemoryPart(TRAINING, role, "gradients", gradient_bytes(own, trained), ("train", "update")))
        here = PHASES if sharding.offload_optimizer else moved
        states = optimizer_bytes(own, trained, own.state_bytes(shape))
        parts.append(MemoryPart(host, role, "optimizer", states, here))
        if sharding.offload_optimizer:
            numbers = trained / sharding.shards
            parts.append(MemoryPart(HOST, role, "gradients", run.precision.main_weights * numbers))
        else:
            parts.append(MemoryPart(TRAINING, role, "optimizer step", update_bytes(own, shape), ("update",)))
        # ZeRO 0 flattens gradients when activations are gone; the others reduce them during the backward pass.
        meanwhile = ("update",) if sharding.stage == 0 else ("train",)
        buckets = MemoryPart(TRAINING, role, "reduction buckets", bucket_bytes(own, trained), meanwhile)
        parts += [buckets] if buckets.bytes else []
    for role, shape in frozen_models(run):
        here = PHASES if role.startswith("reward model") else kept  # it scores samples while engines generate
        parameters = on_rank(shape, shape.parameters, sharding.tensor)
        parts.append(MemoryPart(TRAINING, role, "weights", weight_bytes(run, parameters), here))
        if sharding.stage == 3 and sharding.offload_parameters:
            parts.append(MemoryPart(HOST, role, "weights", whole_weight_bytes(run, parameters) / sharding.shards))
    gathered = max(gathered_bytes(run, shape) for _, shape in [*trained_models(run), *frozen_models(run)])
    if gathered:  # one model at a time
        parts.append(MemoryPart(TRAINING, "all models", "gathered weights", gathered, ("prepare", "train")))
    if run.offload_training:
        parts.append(MemoryPart(HOST, "all models", "states while engines generate", moved_bytes(parts), ("generate",)))
    return parts


def moved_bytes(parts: Sequence[MemoryPart]) -> float:
    """Bytes of training states that leave a GPU while colocated engines generate."""
    return sum(
        part.bytes
        for part in parts
        if part.place == TRAINING
        and part.part in ("weights", "adapters", "optimizer")
        and part.role != "engine"
        and "generate" not in part.phases
    )
