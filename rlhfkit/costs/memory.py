"""Bytes per GPU of a run, part by part and phase by phase, and what of it does not fit.

Activations follow Korthikanti et al. (2022, arXiv:2205.05198, section 4.1), who count the tensors that autograd saves
of a GPT layer; here they are those of Transformers' decoder layers (RMSNorm in float32, rotary positions, grouped
heads, gated feed-forward block) as PyTorch saves them without fusion. States of mixed-precision training are those of
Rajbhandari et al. (ZeRO, 2020, arXiv:1910.02054, section 3.1), with what DeepSpeed 0.19.8 and Lightning 2.6.6 hold
besides. ``benchmarks/estimate.py`` compares them with real runs.

P are trained parameters, R ranks, b bytes of a weight or of a number in matrix products, m bytes of a main weight, N
the tokens of a micro-batch that a rank computes, L layers, and H, Q, K, V, O, I the widths of
:class:`~rlhfkit.costs.LayerShape` (hidden, query, key, value, attention's output, feed-forward). With T tensor ranks P
are the parameters of which a rank has numbers, and ZeRO divides them by the R / T ranks that have the same part.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rlhfkit.costs.model_shape import ModelShape
from rlhfkit.costs.run import GIB, PlacedModel, Run
from rlhfkit.losses.fused_head.tiles import MAX_ROWS, tile_columns

PHASES = ("sync", "generate", "prepare", "train", "update")
"""Of an iteration, in which different things are in memory: ``sync`` sends weights to engines, ``train`` is forward and
backward passes, ``update`` the optimizer's step."""
TRAINING, ENGINE, HOST = "training GPU", "engine GPU", "host, per rank"
"""Where parts are; a placed model has a place of its own, ``"<role> GPU"``."""
RUNTIME_BYTES = 1.5 * GIB
"""CUDA's context, kernels and NCCL's buffers in a process on a GPU."""
ENGINE_RUNTIME_BYTES = 1.0 * GIB
"""CUDA graphs and buffers of an engine beside weights, activations and cache."""
FRAGMENTATION = 0.03
"""The share of a GPU's memory that PyTorch's allocator cannot use."""
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Of a weight of 4 bits: itself, a scale of 8 bits for 64 of them, and one of 32 bits for 256 such scales (QLoRA,
arXiv:2305.14314, section 3)."""
_FULL = 4  # bytes of float32, in which norms and softmax statistics are computed


@dataclass(frozen=True)
class MemoryPart:
    """Bytes of one part."""

    place: str
    role: str
    part: str
    bytes: float
    phases: tuple[str, ...] = PHASES


def phase_bytes(parts: Sequence[MemoryPart], place: str) -> dict[str, float]:
    """Bytes at one place in each phase; phases without any part there are left out."""
    totals = {
        phase: sum(part.bytes for part in parts if part.place == place and phase in part.phases) for phase in PHASES
    }
    return {phase: total for phase, total in totals.items() if total}


def memory_parts(run: Run) -> list[MemoryPart]:
    """Every part of a run's memory."""
    parts = [*state_parts(run), *activation_parts(run), *engine_parts(run)]
    if run.gpu.name != "cpu":
        parts.append(MemoryPart(TRAINING, "process", "CUDA and NCCL", RUNTIME_BYTES))
    return parts + [part for model in run.placed for part in placed_parts(run, model)]


# ------------------------------------------------------------------------------------------------ states


def weight_bytes(run: Run, parameters: float, quantized: float = 0.0) -> float:
    """Bytes of a model's weights, so many of them in 4 bits: ``b P``, at ZeRO 3 ``b P / R``."""
    whole = run.precision.weights * (parameters - quantized) + NF4_BYTES * quantized
    return whole / run.sharding.shards if run.sharding.stage == 3 else whole


def gathered_bytes(run: Run, shape: ModelShape) -> float:
    """Bytes of whole weights that ZeRO 3 gathers meanwhile: at most ``live_parameters``."""
    if run.sharding.stage != 3 or run.sharding.shards == 1:
        return 0.0
    return run.precision.weights * min(shape.on_rank(run.sharding.tensor), run.sharding.live_parameters)


def gradient_bytes(run: Run, trained: float) -> float:
    """Bytes of gradients at the end of the backward pass: ``b P``, from ZeRO 2 on the rank's share ``b P / R``."""
    whole = run.precision.weights * trained
    return whole / run.sharding.shards if (run.sharding.stage or 0) >= 2 else whole


def bucket_bytes(run: Run, trained: float) -> float:
    """Bytes of buffers in which gradients are reduced.

    DDP: a second copy of all gradients. ZeRO 0: one flat copy, at most 500 million numbers (DeepSpeed's
    ``buffered_allreduce_fallback``). ZeRO 1 and 3: a bucket. ZeRO 2: two, as reduction overlaps the backward pass.
    """
    sharding, itemsize = run.sharding, run.precision.weights
    if sharding.stage not in (None, 0):
        return itemsize * sharding.bucket * (2 if sharding.stage == 2 else 1)
    if sharding.shards == 1:
        return 0.0
    return itemsize * (trained if sharding.stage is None else min(trained, 5e8))


def optimizer_bytes(run: Run, trained: float, state: float | None = None) -> float:
    """Bytes of main weights and Adam's two moments: ``3 m P`` (``2 m P`` without main weights), from ZeRO 1 on ``/ R``.

    From ZeRO 1 on DeepSpeed copies main weights of float32 models too; Lightning's own strategies and ZeRO 0 do not.
    ``state``: bytes per parameter of another optimizer's state, in place of the moments.
    """
    precision, sharded = run.precision, (run.sharding.stage or 0) >= 1
    copied = precision.main_weights != precision.weights or sharded
    moments = 2 * precision.main_weights if state is None else state
    numbers = trained / run.sharding.shards if sharded else trained
    return numbers * (moments + (precision.main_weights if copied else 0))


def update_bytes(run: Run, shape: ModelShape) -> float:
    """Bytes that the optimizer's step needs for a moment: gradients as main weights, and its temporary tensors.

    With ZeRO the step is on one flat tensor, into which ZeRO 1 and 2 flatten gradients before they widen them.
    Lightning's own strategies and float32 models at stage 0 step through all tensors at once (``foreach``).
    """
    precision, sharding = run.precision, run.sharding
    trained, temporary = shape.trained_on_rank(sharding.tensor), run.optimizer(shape)[1]
    widened = precision.main_weights != precision.weights
    if sharding.stage in (None, 0) and not widened:
        return temporary * trained
    numbers = trained / sharding.shards if (sharding.stage or 0) >= 1 else trained
    flat = sharding.stage in (1, 2)
    before = precision.weights if flat and widened else 0.0
    return numbers * (max(temporary, before) + (precision.main_weights if widened or flat else 0.0))


def state_parts(run: Run) -> list[MemoryPart]:
    """Weights, gradients and optimizer states of all models, and what is gathered or buffered of them."""
    parts: list[MemoryPart] = []
    sharding = run.sharding
    kept = tuple(phase for phase in PHASES if phase != "generate") if run.offload_training else PHASES
    moved = tuple(phase for phase in kept if phase != "sync") if run.offload_training else PHASES
    for role, shape in run.trained.items():
        own, trained = run.of_trained(shape), shape.trained_on_rank(sharding.tensor)
        parts.append(_weights(run, role, shape, kept))
        if shape.adapters:
            parts.append(MemoryPart(TRAINING, role, "adapters", own.precision.weights * shape.adapters, kept))
        parts.append(MemoryPart(TRAINING, role, "gradients", gradient_bytes(own, trained), ("train", "update")))
        states = optimizer_bytes(own, trained, own.optimizer(shape)[0])
        if sharding.offload_optimizer:
            gradients = run.precision.main_weights * trained / sharding.shards
            parts.append(MemoryPart(HOST, role, "optimizer", states))
            parts.append(MemoryPart(HOST, role, "gradients", gradients))
        else:
            parts.append(MemoryPart(TRAINING, role, "optimizer", states, moved))
            parts.append(MemoryPart(TRAINING, role, "optimizer step", update_bytes(own, shape), ("update",)))
        # ZeRO 0 flattens gradients when activations are gone; the others reduce them during the backward pass.
        meanwhile = ("update",) if sharding.stage == 0 else ("train",)
        buckets = MemoryPart(TRAINING, role, "reduction buckets", bucket_bytes(own, trained), meanwhile)
        parts += [buckets] if buckets.bytes else []
    for role, shape in run.frozen.items():  # reward models score samples while engines generate
        parts.append(_weights(run, role, shape, PHASES if role.startswith("reward model") else kept))
    gathered = max(gathered_bytes(run, shape) for shape in run.held.values())
    if gathered:  # one model at a time
        parts.append(MemoryPart(TRAINING, "all models", "gathered weights", gathered, ("prepare", "train")))
    if run.offload_training:
        leaving = [part for part in parts if part.phases in (kept, moved)]
        away = sum(part.bytes for part in leaving)
        parts.append(MemoryPart(HOST, "all models", "states while engines generate", away, ("generate",)))
    return parts


def _weights(run: Run, role: str, shape: ModelShape, phases: tuple[str, ...]) -> MemoryPart:
    """Weights on the GPU in these phases, or with offloaded parameters always in the host's memory."""
    found = weight_bytes(run, shape.on_rank(run.sharding.tensor), shape.quantized)
    if run.sharding.stage == 3 and run.sharding.offload_parameters:
        return MemoryPart(HOST, role, "weights", found)
    return MemoryPart(TRAINING, role, "weights", found, phases)


# ------------------------------------------------------------------------------------------------ activations


def layer_bytes(run: Run, shape: ModelShape) -> float:
    """Bytes that autograd saves of one layer.

    Per token: two norms ``2 (4 H + r H)`` (their float32 input and the output) and the inputs of the projections after
    them ``2 b H``; attention ``b (Q + K + V + 2 O) + 4 heads`` (the last: log-sum-exp); the feed-forward block
    ``4 b I`` with a gate, ``2 b I`` without, nothing in tiles. Norms of queries and keys add ``(4 + b) (Q + K)``. A
    mixture saves the gathered inputs and the weighted outputs of each chosen expert: ``2 b H`` each. ``eager``
    attention saves scores and probabilities: ``heads * longest * (b + 4)``. r are bytes of the residual stream: with
    autocast 4, and each projection saves a cast input of its own. Tensor parallelism divides what belongs to heads and
    to the feed-forward block (Korthikanti et al., section 4.2).
    """
    layer, itemsize, residual = shape.layer, run.precision.compute, run.precision.weights
    projections = 2 * itemsize if residual == itemsize else 2 * residual + 5 * itemsize
    whole = (2 * (_FULL + residual) + projections) * layer.hidden
    numbers: float = layer.query + layer.key + layer.value + 2 * layer.attention_output
    attended = itemsize * numbers + _FULL * layer.heads
    if run.attention == "eager":
        attended += layer.heads * min(run.longest, run.micro_batch_tokens) * (itemsize + _FULL)
    if layer.normalized_heads:
        attended += (_FULL + itemsize) * (layer.query + layer.key)
    block = 0 if run.tile(shape) is not None else (4 if layer.gated else 2) * itemsize * layer.intermediate
    experts = 2 * itemsize * layer.hidden * layer.experts_per_token
    return run.part_tokens * (whole + (attended + block) / run.sharding.tensor + experts)


def saved_bytes(run: Run, shape: ModelShape) -> float:
    """Bytes that autograd holds of all layers between forward and backward.

    L times :func:`layer_bytes`, with checkpointing the input of each layer, ``L r N H``; the last norm
    ``(4 + r) N H``.
    """
    inputs, residual = run.part_tokens * shape.layer.hidden, run.precision.weights
    layers = shape.layers * (inputs * residual if run.gradient_checkpointing else layer_bytes(run, shape))
    return layers + inputs * (_FULL + residual)


def backward_bytes(run: Run, shape: ModelShape) -> float:
    """Bytes that the backward pass of one layer holds beside all saved tensors, at its widest place.

    That is the feed-forward block. While the gradient of the product is formed, that of the last weight exists too:
    ``b (N I + H I)``; then both factors' gradients beside the product's: ``2 b N I``. The larger of the two, and
    gradients of the residual stream ``2 b N H``. In tiles of t tokens the block is recomputed, ``4 b t I``, and N is t
    there; attention is then the widest place: ``b N (Q + K + V + O)``. A checkpointed layer is computed again.
    """
    layer, itemsize, tokens, sharding = shape.layer, run.precision.compute, run.part_tokens, run.sharding
    tile = run.tile(shape)
    block = (tokens if tile is None else tile) * layer.intermediate / sharding.tensor
    weight = layer.hidden * layer.intermediate / max(layer.experts_per_token, 1) / sharding.tensor
    widest = max(2 * block, block + weight)
    if tile is not None:
        attended = tokens * (layer.query + layer.key + layer.value + layer.attention_output) / sharding.tensor
        widest = max(widest + (4 if layer.gated else 2) * block, attended)
    moment = itemsize * (widest + 2 * tokens * layer.hidden)
    if sharding.stage == 2:  # DeepSpeed collects the rank's share of a micro-batch's gradients beside earlier ones
        moment += run.precision.weights * shape.trained_on_rank(sharding.tensor) / sharding.shards
    if run.gradient_checkpointing:
        moment += layer_bytes(run, shape)
        if offloaded_activations(run, shape):  # the input of the layer is back, and the next one on its way
            moment += 2 * tokens * layer.hidden * run.precision.weights
    return moment


def offloaded_activations(run: Run, shape: ModelShape) -> float:
    """Bytes of the inputs of layers that wait in the host's memory: ``L r N H`` with ``offload_activations``."""
    if not (run.offload_activations and run.gradient_checkpointing) or run.gpu.name == "cpu":
        return 0.0
    return shape.layers * run.part_tokens * shape.layer.hidden * run.precision.weights


def head_bytes(run: Run, shape: ModelShape) -> float:
    """Bytes that the output layer and the loss hold at their widest place, M trained tokens, W vocabulary entries.

    Fused (:func:`~rlhfkit.losses.linear_logprobs`): the selected hidden states and their gradient ``(2 b + 4) M H``,
    the gradient of the weight before it is added ``b W H`` (twice when tied, the embedding has one too), and the
    buffers of one tile of logits: on GPUs raw logits and their gradient; on CPUs float32 copies of narrow types.
    Dense: logits, those of the selected tokens, and their gradient: ``3 b M W``. Of T tensor ranks each computes W / T
    entries; the weight, and its gradient, are whole on all.
    """
    tokens, itemsize, hidden = run.trained_part_tokens, run.precision.compute, shape.layer.hidden
    weight = 0.0 if shape.adapters else itemsize * shape.vocabulary * hidden * (2 if shape.tied else 1)
    selected = tokens * hidden * itemsize
    if not shape.fused_head:
        return 3 * itemsize * tokens * shape.vocabulary + 2 * selected + weight
    gradients = tokens * hidden * (_FULL + (itemsize if itemsize < _FULL else 0))
    rows = max(1, min(int(tokens), MAX_ROWS))
    dtype, on_cpu = (torch.bfloat16 if itemsize == 2 else torch.float32), run.gpu.name == "cpu"
    columns = tile_columns(rows, shape.vocabulary // run.sharding.tensor, dtype, "cpu" if on_cpu else "cuda")
    buffers = itemsize + (2 * _FULL if itemsize < _FULL else 0) if on_cpu else 2 * itemsize
    return selected + gradients + weight + rows * columns * buffers


def inference_bytes(shape: ModelShape, tokens: float, *, itemsize: int, tensor: int = 1) -> float:
    """Bytes of a forward pass without gradient: ``b N (3 I / T + 3 H)``, gate, up, their product and the stream."""
    return itemsize * tokens * (3 * shape.layer.intermediate / tensor + 3 * shape.layer.hidden)


def activation_parts(run: Run) -> list[MemoryPart]:
    """Activations of the forward and backward pass: what is saved, and the widest of the moments beside it."""
    compute, sharding = run.precision.compute, run.sharding
    parts: list[MemoryPart] = []
    moment, widest = "backward buffers", 0.0
    for role, shape in run.trained.items():
        away = offloaded_activations(run, shape)
        saved = saved_bytes(run, shape) - away
        parts.append(MemoryPart(TRAINING, role, "activations", saved, ("train",)))
        if away:
            parts.append(MemoryPart(HOST, role, "activations", away, ("train",)))
        if run.precision.weights != compute:
            cast = compute * (shape.on_rank(sharding.tensor) - shape.quantized)
            parts.append(MemoryPart(TRAINING, role, "weights cast by autocast", cast, ("train",)))
        backward = backward_bytes(run, shape)
        if role == "policy":
            moments = ("backward buffers", backward), ("logits head", head_bytes(run, shape))
            moment, widest = max(moments, key=lambda one: one[1])
        elif backward >= widest - saved:  # its backward pass ends, and frees what it saved, before the policy's begins
            moment, widest = "backward buffers", backward
        else:
            widest -= saved
    owner = "policy" if moment == "logits head" else "all models"
    parts.append(MemoryPart(TRAINING, owner, moment, widest, ("train",)))
    if run.engine is not None:
        joined = sharding.group * min(run.prepare_tokens, run.tokens / sharding.ranks) / sharding.sequence
        passing = (inference_bytes(one, joined, itemsize=compute, tensor=sharding.tensor) for one in run.held.values())
        parts.append(MemoryPart(TRAINING, "all models", "forward passes", max(passing), ("prepare",)))
    return parts


# ------------------------------------------------------------------------------------------------ engines


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


def cache_sequence_bytes(run: Run, length: float) -> float:
    """Bytes of a sequence's keys and values on one GPU of an engine; layers with a window keep no more than that.

    Tensor parallelism splits the key heads, but not beyond one head per GPU; pipeline stages split the layers.
    """
    assert run.engine is not None
    shape, engine = run.policy, run.engine
    windowed = shape.windowed_layers / shape.layers if shape.window else 0.0
    kept = length * (1 - windowed) + min(length, shape.window or length) * windowed
    parts = min(engine.tensor_parallel, shape.cache_heads) * engine.pipeline_parallel
    return kept * shape.cached * engine.itemsize / parts


def engine_itemsize(run: Run) -> float:
    """Mean bytes of an engine's weight; in 8 bits embedding and output layer stay as they are."""
    assert run.engine is not None
    if not run.engine.quantized:
        return run.engine.itemsize
    kept = (run.policy.embedding + run.policy.head) / run.policy.parameters
    return kept * run.engine.itemsize + (1 - kept)


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
    weights = divided * engine_itemsize(run) / (engine.tensor_parallel * engine.pipeline_parallel)
    mean = max(cache_sequence_bytes(run, run.sequence_tokens), 1.0)
    longest = max(cache_sequence_bytes(run, run.longest), 1.0)
    if engine.local:
        rows = min(engine.max_sequences, math.ceil(run.sequences / run.sharding.ranks))
        step = inference_bytes(shape, rows * run.prompt_tokens, itemsize=engine.itemsize)
        return EngineMemory(weights, step + 2 * _FULL * rows * shape.vocabulary, rows * longest, rows, rows)
    step = inference_bytes(shape, engine.prefill_tokens, itemsize=engine.itemsize) / engine.tensor_parallel
    activations = step + 2 * _FULL * engine.max_sequences * shape.vocabulary + ENGINE_RUNTIME_BYTES
    room = engine.memory_share * run.gpu.memory - weights - activations
    cache = room if engine.cache_bytes is None else engine.cache_bytes
    return EngineMemory(weights, activations, cache, max(cache / mean, 0.0), max(cache / longest, 0.0))


def engine_parts(run: Run) -> list[MemoryPart]:
    """Weights, activations and cache of an engine on one GPU."""
    engine = run.engine
    if engine is None:
        return []
    found = engine_memory(run)
    place = TRAINING if engine.colocated or engine.local else ENGINE
    awake = ("generate",) if engine.colocated or engine.local else PHASES
    weights = 0.0 if engine.shares_weights else found.weights
    return [
        MemoryPart(place, "engine", "weights", weights, ("sync", "generate") if engine.colocated else PHASES),
        MemoryPart(place, "engine", "activations", found.activations, awake),
        MemoryPart(place, "engine", "key-value cache", max(found.cache, 0), awake),
    ]


# ------------------------------------------------------------------------------------------------ placed models


def placed_parts(run: Run, model: PlacedModel) -> list[MemoryPart]:
    """Parts of the memory of a model on GPUs of its own, per GPU.

    A frozen model: its weights, divided over the GPUs of a replica, and one forward pass of ``prepare_tokens``. A
    trained one: what a training rank holds of such a model, with the sharding of its own ranks.
    """
    place = f"{model.role} GPU"
    if model.sharding is not None:
        alone = replace(
            run,
            policy=model.shape,
            sharding=model.sharding,
            critic=None,
            frozen={},
            placed=(),
            engine=None,
            offload_training=False,
        )
        parts = [replace(part, place=place) for part in memory_parts(alone) if part.place == TRAINING]
        return [replace(part, role=model.role) if part.role == "policy" else part for part in parts]
    itemsize, shape = run.precision.weights, model.shape
    passing = inference_bytes(shape, run.prepare_tokens, itemsize=run.precision.compute)
    if model.gpus > 1:  # whole layers are gathered one after the other
        passing += itemsize * shape.parameters / shape.layers
    parts = [
        MemoryPart(place, model.role, "weights", itemsize * shape.parameters / model.gpus),
        MemoryPart(place, model.role, "forward passes", passing),
    ]
    return parts + ([MemoryPart(place, "process", "CUDA and NCCL", RUNTIME_BYTES)] if run.gpu.name != "cpu" else [])


# ------------------------------------------------------------------------------------------------ what does not fit


def memory_problems(run: Run, parts: Sequence[MemoryPart]) -> list[str]:
    """What does not fit, in the order in which a run would meet it."""
    problems, room = _engine_problems(run), run.gpu.memory * (1 - FRAGMENTATION)
    for place in [TRAINING, *(f"{model.role} GPU" for model in run.placed)]:
        for phase, total in phase_bytes(parts, place).items():
            if total <= room:
                continue
            here = [part for part in parts if part.place == place and phase in part.phases]
            largest = sorted(here, key=lambda part: -part.bytes)[:3]
            named = ", ".join(f"{part.role} {part.part} {in_gib(part.bytes)}" for part in largest)
            problems.append(
                f"{place}, {phase}: {in_gib(total)}, and a {run.gpu.name} has {in_gib(room)}; the largest parts are "
                f"{named}. {_advice(run, place, phase, largest[0].part)}"
            )
    return problems


def _advice(run: Run, place: str, phase: str, largest: str) -> str:
    """The change that most likely helps."""
    if place != TRAINING:
        return "Divide the model over more GPUs, or lower max_tokens_per_forward"
    if phase in ("generate", "sync") and run.engine is not None and run.engine.colocated:
        return "Lower gpu_memory_utilization of the colocated engine, offload the optimizer, or give engines their GPUs"
    if largest in ("activations", "logits head", "backward buffers"):
        if not run.gradient_checkpointing:
            return "Set ModelLoading(gradient_checkpointing=True), or make micro-batches smaller"
        return (
            "Make micro-batches smaller, divide rows over more ranks (sequence_parallel_size), or set tiled_mlp=True "
            "and offload_activations=True"
        )
    if run.sharding.ranks > 1 and run.sharding.stage != 3:
        return "Use strategy='rlhf_zero3'"
    return "Use more GPUs, strategy='rlhf_zero3_offload', or train adapters (lora)"


def _engine_problems(run: Run) -> list[str]:
    engine = run.engine
    if engine is None or engine.local:
        return []
    found, budget = engine_memory(run), in_gib(engine.memory_share * run.gpu.memory)
    if engine.cache_bytes is None and found.cache <= 0:
        return [
            f"the engine's weights ({in_gib(found.weights)} on each of {engine.gpus} GPUs) and activations "
            f"({in_gib(found.activations)}) leave no key-value cache in {budget}: raise tensor_parallel_size or "
            "gpu_memory_utilization"
        ]
    if found.longest < 1:
        return [
            f"the engine's key-value cache ({in_gib(found.cache)}) is too small for one sequence of {run.longest:,.0f} "
            f"tokens ({in_gib(cache_sequence_bytes(run, run.longest))}): raise tensor_parallel_size or "
            "gpu_memory_utilization, or lower max_new_tokens"
        ]
    return []


def in_gib(size: float) -> str:
    """A number of bytes in words."""
    return f"{size / GIB:.1f} GiB" if size < 1024 * GIB else f"{size / GIB / 1024:.2f} TiB"
