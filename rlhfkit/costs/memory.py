"""Bytes per GPU of a run, part by part and phase by phase, and what of it does not fit.

States of mixed-precision training with Adam are those of Rajbhandari et al. (ZeRO, 2020, arXiv:1910.02054, section
3.1), with what DeepSpeed 0.19.8 and Lightning 2.6.6 hold besides: reduction buckets, gathered weights, flat gradients
of the step. P are trained parameters, R ranks, b bytes of a weight, m bytes of a main weight. With T tensor ranks P are
the parameters of which a rank has numbers, and ZeRO divides each by the R / T ranks that have the same part.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlhfkit.costs.activations import backward_bytes, head_bytes, inference_bytes, layer_bytes, saved_bytes
from rlhfkit.costs.hardware import GIB
from rlhfkit.costs.model_shape import ModelShape
from rlhfkit.costs.parallelism import exchange_bytes, joined_bytes, on_rank, refusals, repeated_keys
from rlhfkit.costs.run import Run

PHASES = ("sync", "generate", "prepare", "train", "update")
"""Of an iteration, in which different things are in memory: ``sync`` sends weights to engines, ``train`` is forward and
backward passes, ``update`` the optimizer's step."""
TRAINING, ENGINE, HOST = "training GPU", "engine GPU", "host, per rank"
"""Where parts are."""
RUNTIME_BYTES = 1.5 * GIB
"""CUDA's context, kernels and NCCL's buffers in a process on a GPU."""
FRAGMENTATION = 0.03
"""The share of a GPU's memory that PyTorch's allocator cannot use."""
ENGINE_RUNTIME_BYTES = 1.0 * GIB
"""CUDA graphs and buffers of an engine beside weights, activations and cache."""
BYTES_PER_TOKEN = 40
"""Of an iteration's data on the rank that has it, at most: token ids, log-probs, versions, masks, advantages."""
BYTES_PER_SEQUENCE = 200
"""Of each sequence of the iteration on every rank, at most: rewards, groups, lengths."""


@dataclass(frozen=True)
class MemoryPart:
    """Bytes of one part."""

    place: str
    role: str
    part: str
    bytes: float
    phases: tuple[str, ...] = PHASES


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of an engine per GPU."""

    weights: float
    activations: float
    cache: float
    """The key-value cache; below 0: the rest leaves no room for one."""
    sequences: float
    """Sequences of mean length whose keys and values fit into the cache."""
    longest: float
    """Sequences of the greatest length that fit."""


# ------------------------------------------------------------------------------------------------ states of training


def weight_bytes(run: Run, parameters: float) -> float:
    """Bytes of a model's weights: ``b P``, at ZeRO 3 ``b P / R``; 0 on the GPU with offloaded parameters.

    Frozen models are sharded at stage 3 only. ZeRO 1 and 2 round up to whole flat buffers, which is left out.
    """
    whole = run.precision.weights * parameters
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


def optimizer_bytes(run: Run, trained: float) -> float:
    """Bytes of main weights and Adam's two moments: ``3 m P`` (``2 m P`` without main weights), from ZeRO 1 on ``/ R``.

    From ZeRO 1 on DeepSpeed copies main weights of float32 models too; Lightning's own strategies and ZeRO 0 do not.
    """
    precision, sharding = run.precision, run.sharding
    copied = precision.main_weights != precision.weights or (sharding.stage or 0) >= 1
    numbers = trained / sharding.shards if (sharding.stage or 0) >= 1 else trained
    return precision.main_weights * numbers * (3 if copied else 2)


def update_bytes(run: Run, shape: ModelShape) -> float:
    """Bytes that the optimizer's step needs for a moment: gradients as main weights, and Adam's denominators.

    With ZeRO the step is on one flat tensor: gradients as main weights if these are wider, and two temporary tensors of
    that size. Lightning's own strategies and float32 models at stage 0 step tensor by tensor on a CPU, and all at once
    on a GPU (``foreach``).
    """
    precision, sharding = run.precision, run.sharding
    trained = on_rank(shape, shape.trained, sharding.tensor)
    if sharding.stage in (None, 0) and precision.main_weights == precision.weights:
        largest = min(shape.largest_tensor, trained)
        return precision.main_weights * (2 * largest if run.gpu.name == "cpu" else trained)
    numbers = trained / sharding.shards if (sharding.stage or 0) >= 1 else trained
    widened = 1 if precision.main_weights != precision.weights or sharding.stage in (1, 2) else 0
    return precision.main_weights * numbers * (2 + widened)


def trained_models(run: Run) -> list[tuple[str, ModelShape]]:
    """Role and shape of each model that has an optimizer."""
    return [("policy", run.policy)] + ([("critic", run.critic)] if run.critic else [])


def frozen_models(run: Run) -> list[tuple[str, ModelShape]]:
    """Role and shape of each model that has none."""
    found = (("reference", run.reference), ("reward model", run.reward_model), ("teacher", run.teacher))
    return [(role, shape) for role, shape in found if shape is not None]


def _weights_of(run: Run, role: str, shape: ModelShape) -> float:
    whole = shape.backbone if role in ("critic", "reward model") else shape.parameters
    return on_rank(shape, whole, run.sharding.tensor)


def _state_parts(run: Run) -> list[MemoryPart]:
    """Weights, gradients and optimizer states of all models, and what is gathered or buffered of them."""
    parts = []
    sharding = run.sharding
    kept = tuple(phase for phase in PHASES if phase != "generate") if run.offload_training else PHASES
    moved = tuple(phase for phase in kept if phase != "sync") if run.offload_training else PHASES
    for role, shape in trained_models(run):
        parameters = _weights_of(run, role, shape)
        trained = shape.adapters or parameters
        host = HOST if sharding.offload_optimizer else TRAINING
        parts.append(MemoryPart(TRAINING, role, "weights", weight_bytes(run, parameters), kept))
        if shape.adapters:
            parts.append(MemoryPart(TRAINING, role, "adapters", run.precision.weights * shape.adapters, kept))
        if sharding.stage == 3 and sharding.offload_parameters:
            offloaded = run.precision.weights * parameters / sharding.shards
            parts.append(MemoryPart(HOST, role, "weights", offloaded))
        parts.append(MemoryPart(TRAINING, role, "gradients", gradient_bytes(run, trained), ("train", "update")))
        here = PHASES if sharding.offload_optimizer else moved
        parts.append(MemoryPart(host, role, "optimizer", optimizer_bytes(run, trained), here))
        if sharding.offload_optimizer:
            numbers = trained / sharding.shards
            parts.append(MemoryPart(HOST, role, "gradients", run.precision.main_weights * numbers))
        else:
            parts.append(MemoryPart(TRAINING, role, "optimizer step", update_bytes(run, shape), ("update",)))
        # ZeRO 0 flattens gradients when activations are gone; the others reduce them during the backward pass.
        meanwhile = ("update",) if sharding.stage == 0 else ("train",)
        buckets = MemoryPart(TRAINING, role, "reduction buckets", bucket_bytes(run, trained), meanwhile)
        parts += [buckets] if buckets.bytes else []
    for role, shape in frozen_models(run):
        here = PHASES if role == "reward model" else kept  # it scores samples while engines generate
        size = weight_bytes(run, _weights_of(run, role, shape))
        parts.append(MemoryPart(TRAINING, role, "weights", size, here))
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


# ------------------------------------------------------------------------------------------------ activations


def _activation_parts(run: Run) -> list[MemoryPart]:
    """Activations of the forward and backward pass: what is saved, and the widest of the moments beside it."""
    compute, residual, sharding = run.precision.compute, run.precision.weights, run.sharding
    parts: list[MemoryPart] = []
    moment, widest = "backward buffers", 0.0
    for role, shape in trained_models(run):
        saved = saved_bytes(
            shape,
            run.part_tokens,
            itemsize=compute,
            residual_itemsize=residual,
            gradient_checkpointing=run.gradient_checkpointing,
            attention=run.attention,
            longest=min(run.longest, run.micro_batch_tokens),
            tensor=sharding.tensor,
            repeated_keys=repeated_keys(shape.layer, sharding),
            tiled=run.tile(shape) is not None,
        )
        away = offloaded_activations(run, shape) if run.gpu.name != "cpu" else 0.0
        saved -= away
        parts.append(MemoryPart(TRAINING, role, "activations", saved, ("train",)))
        if away:
            parts.append(MemoryPart(HOST, role, "activations", away, ("train",)))
        if residual != compute:
            cast = compute * on_rank(shape, shape.parameters, sharding.tensor)
            parts.append(MemoryPart(TRAINING, role, "weights cast by autocast", cast, ("train",)))
        backward = _backward_moment(run, shape)
        if role == "policy":
            head = _head_moment(run, shape)
            moment, widest = max(("backward buffers", backward), ("logits head", head), key=lambda one: one[1])
        elif backward >= widest - saved:  # its backward pass ends, and frees what it saved, before the policy's begins
            moment, widest = "backward buffers", backward
        else:
            widest -= saved
    parts.append(
        MemoryPart(TRAINING, "policy" if moment == "logits head" else "all models", moment, widest, ("train",))
    )
    if run.engine is not None:
        joined = sharding.group * min(run.prepare_tokens, run.tokens / sharding.ranks)
        widest = max(
            inference_bytes(shape, joined / sharding.sequence, itemsize=compute, tensor=sharding.tensor)
            for _, shape in [*trained_models(run), *frozen_models(run)]
        )
        parts.append(MemoryPart(TRAINING, "all models", "forward passes", widest, ("prepare",)))
    if sharding.group > 1:
        parts.append(MemoryPart(TRAINING, "all models", "joined row's layout", joined_bytes(run), ("train",)))
    return parts


def offloaded_activations(run: Run, shape: ModelShape) -> float:
    """Bytes of the inputs of layers that wait in the host's memory: ``L b N H`` with ``offload_activations``."""
    if not (run.offload_activations and run.gradient_checkpointing):
        return 0.0
    return shape.layers * run.part_tokens * shape.layer.hidden * run.precision.weights


def _head_moment(run: Run, shape: ModelShape) -> float:
    """Bytes beside saved tensors while the policy's output layer runs."""
    return head_bytes(
        shape,
        run.trained_part_tokens,
        itemsize=run.precision.compute,
        fused=shape.fused_head,
        entropy=run.entropy,
        trained=not shape.adapters,
        device="cpu" if run.gpu.name == "cpu" else "cuda",
        tensor=run.sharding.tensor,
    )


def _backward_moment(run: Run, shape: ModelShape) -> float:
    """Bytes beside saved tensors while a layer's gradient is computed; its saved tensors if they are recomputed.

    Numbers are exchanged with other sequence ranks when the feed-forward block's are gone.
    """
    compute, tokens, sharding = run.precision.compute, run.part_tokens, run.sharding
    moment = max(
        backward_bytes(shape.layer, tokens, itemsize=compute, tensor=sharding.tensor, tile=run.tile(shape)),
        exchange_bytes(shape.layer, tokens, sharding, itemsize=compute),
    )
    moment += micro_batch_gradient_bytes(run, on_rank(shape, shape.trained, sharding.tensor))
    if run.gradient_checkpointing:
        moment += layer_bytes(
            shape.layer,
            tokens,
            itemsize=compute,
            residual_itemsize=run.precision.weights,
            attention=run.attention,
            longest=min(run.longest, run.micro_batch_tokens),
            tensor=sharding.tensor,
            repeated_keys=repeated_keys(shape.layer, sharding),
            tiled=run.tile(shape) is not None,
        )
        if (
            offloaded_activations(run, shape) and run.gpu.name != "cpu"
        ):  # the input of the layer is back, and the next one on its way
            moment += 2 * tokens * shape.layer.hidden * run.precision.weights
    return moment


# ------------------------------------------------------------------------------------------------ engines and data


def cache_token_bytes(run: Run) -> float:
    """Bytes of a token's keys and values on one GPU of an engine, in layers without a window and with one alike.

    Tensor parallelism splits the key heads, but not beyond one head per GPU; pipeline stages split the layers.
    """
    assert run.engine is not None
    parts = min(run.engine.tensor_parallel, run.policy.cache_heads) * run.engine.pipeline_parallel
    return run.policy.cached * run.engine.itemsize / parts


def cache_sequence_bytes(run: Run, length: float) -> float:
    """Bytes of a sequence's keys and values on one GPU of an engine; layers with a window keep that many tokens."""
    shape = run.policy
    kept = length
    if shape.window:
        windowed = shape.windowed_layers / shape.layers
        kept = length * (1 - windowed) + min(length, shape.window) * windowed
    return cache_token_bytes(run) * kept


def engine_memory(run: Run) -> EngineMemory:
    """Divide an engine's share of a GPU into weights, activations of one step of prompts, and the cache.

    As vLLM does when it starts: what is left of ``gpu_memory_utilization`` is the cache. A ``LocalEngine`` has no
    budget; it makes a cache for the sequences that it decodes at once.

    Raises:
        ValueError: If the run has no engine.
    """
    engine, shape = run.engine, run.policy
    if engine is None:
        raise ValueError("engine_memory is about the engine of a run, and this run has none")
    # vLLM divides experts over all processes of an engine.
    divided = shape.parameters - shape.experts + shape.experts / engine.data_parallel
    weights = divided * engine.itemsize / (engine.tensor_parallel * engine.pipeline_parallel)
    mean = max(cache_sequence_bytes(run, run.prompt_tokens + run.answer_tokens), 1.0)
    longest = max(cache_sequence_bytes(run, run.longest), 1.0)
    if engine.local:
        rows = min(engine.max_sequences, math.ceil(run.sequences / run.sharding.ranks))
        cache = rows * longest
        logits = 2 * 4.0 * rows * shape.vocabulary
        activations = logits + inference_bytes(shape, rows * run.prompt_tokens, itemsize=engine.itemsize)
        return EngineMemory(weights, activations, cache, rows, rows)
    step = inference_bytes(shape, engine.prefill_tokens, itemsize=engine.itemsize) / engine.tensor_parallel
    activations = step + 2 * 4.0 * engine.max_sequences * shape.vocabulary + ENGINE_RUNTIME_BYTES
    room = engine.memory_share * run.gpu.memory - weights - activations
    cache = room if engine.cache_bytes is None else engine.cache_bytes
    return EngineMemory(weights, activations, cache, max(cache / mean, 0.0), max(cache / longest, 0.0))


def _engine_parts(run: Run) -> list[MemoryPart]:
    engine = run.engine
    if engine is None:
        return []
    found = engine_memory(run)
    place = TRAINING if engine.colocated or engine.local else ENGINE
    awake = ("generate",) if engine.colocated else PHASES
    parts = [
        MemoryPart(place, "engine", "weights", found.weights, ("sync", *awake) if engine.colocated else PHASES),
        MemoryPart(place, "engine", "activations", found.activations, ("generate",) if engine.local else awake),
        MemoryPart(place, "engine", "key-value cache", max(found.cache, 0), ("generate",) if engine.local else awake),
    ]
    if engine.sleeping_weights_on_host:
        parts.append(MemoryPart(HOST, "engine", "sleeping weights", found.weights))
    return parts


def iteration_bytes(run: Run) -> float:
    """Bytes of an iteration's data on a rank: 40 B for each token of its own rows, 200 B for each sequence of all."""
    own = run.sequences * run.sequence_tokens / run.sharding.ranks
    return BYTES_PER_TOKEN * own + BYTES_PER_SEQUENCE * run.sequences


# ------------------------------------------------------------------------------------------------ all together


def memory_parts(run: Run) -> list[MemoryPart]:
    """Every part of a run's memory."""
    parts = [*_state_parts(run), *_activation_parts(run), *_engine_parts(run)]
    if run.gpu.name != "cpu":
        parts.append(MemoryPart(TRAINING, "process", "CUDA and NCCL", RUNTIME_BYTES))
    if run.engine is not None:
        parts.append(MemoryPart(HOST, "iteration", "samples", iteration_bytes(run)))
    return parts


def phase_bytes(parts: Sequence[MemoryPart], place: str) -> dict[str, float]:
    """Bytes at one place in each phase; phases without any part there are left out."""
    totals = {
        phase: sum(part.bytes for part in parts if part.place == place and phase in part.phases) for phase in PHASES
    }
    return {phase: total for phase, total in totals.items() if total}


def memory_problems(run: Run, parts: Sequence[MemoryPart]) -> list[str]:
    """What does not fit, in the order in which a run would meet it."""
    models = [*trained_models(run), *frozen_models(run)]
    refused = [problem for role, shape in models for problem in refusals(role, shape, run.sharding)]
    return [*refused, *_engine_problems(run), *_training_problems(run, parts)]


def _engine_problems(run: Run) -> list[str]:
    engine = run.engine
    if engine is None or engine.local:
        return []
    found, problems = engine_memory(run), []
    if run.policy.layer.heads % engine.tensor_parallel:
        problems.append(
            f"tensor_parallel_size={engine.tensor_parallel} does not divide the {run.policy.layer.heads} attention "
            "heads, which vLLM requires"
        )
    if engine.pipeline_parallel > run.policy.layers:
        problems.append(
            f"pipeline_parallel_size={engine.pipeline_parallel} is more than the {run.policy.layers} layers"
        )
    budget = engine.memory_share * run.gpu.memory
    gpus = engine.tensor_parallel * engine.pipeline_parallel * engine.data_parallel
    if engine.cache_bytes is None and found.cache <= 0:
        problems.append(
            f"the engine's weights ({_gib(found.weights)} on each of {gpus} GPUs) and activations "
            f"({_gib(found.activations)}) leave no key-value cache in {_gib(budget)}: raise tensor_parallel_size or "
            "gpu_memory_utilization"
        )
    elif found.longest < 1:
        problems.append(
            f"the engine's key-value cache ({_gib(found.cache)}) is too small for one sequence of {run.longest:,.0f} "
            f"tokens ({_gib(cache_sequence_bytes(run, run.longest))}): raise tensor_parallel_size or "
            "gpu_memory_utilization, or lower max_new_tokens"
        )
    return problems


def _training_problems(run: Run, parts: Sequence[MemoryPart]) -> list[str]:
    room = run.gpu.memory * (1 - FRAGMENTATION)
    problems = []
    for phase, total in phase_bytes(parts, TRAINING).items():
        if total <= room:
            continue
        here = [part for part in parts if part.place == TRAINING and phase in part.phases]
        largest = sorted(here, key=lambda part: -part.bytes)[:3]
        named = ", ".join(f"{part.role} {part.part} {_gib(part.bytes)}" for part in largest)
        problems.append(
            f"{phase}: {_gib(total)} per GPU, and a {run.gpu.name} has {_gib(room)}; the largest parts are {named}. "
            f"{_advice(run, phase, largest[0])}"
        )
    return problems


def _advice(run: Run, phase: str, largest: MemoryPart) -> str:
    """The change that most likely helps."""
    stage = run.sharding.stage
    if phase in ("generate", "sync") and run.engine is not None and run.engine.colocated:
        return "Lower gpu_memory_utilization of the colocated engine, offload the optimizer, or give engines their GPUs"
    if largest.part in ("activations", "logits head", "backward buffers"):
        alone = (
            run.micro_batch_tokens <= run.longest * run.sequences_together
        )  # a row is never divided over micro-batches
        smaller = "divide rows over more ranks (sequence_parallel_size)" if alone else "make micro-batches smaller"
        if not run.gradient_checkpointing:
            return f"Set gradient_checkpointing=True, or {smaller}"
        if alone and not run.tiled_mlp and not run.policy.experts:
            return f"{smaller[0].upper()}{smaller[1:]}, or set tiled_mlp=True and offload_activations=True"
        return smaller[0].upper() + smaller[1:]
    if run.sharding.ranks > 1 and stage != 3:
        return f"Use strategy='rlhf_zero3' in place of {'none' if stage is None else f'stage {stage}'}"
    if not run.sharding.offload_optimizer:
        return "Use more GPUs, or strategy='rlhf_zero3_offload', or train adapters (lora)"
    return "Use more GPUs, or train adapters (lora)"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size < 1024 * GIB else f"{size / GIB / 1024:.2f} TiB"
