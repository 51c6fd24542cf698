"""Bytes of engines and of an iteration's samples, and engines that do not fit."""

import math
from dataclasses import dataclass

from rlhfkit.costs.hardware import GIB
from rlhfkit.costs.memory.activations import inference_bytes
from rlhfkit.costs.memory.parts import ENGINE, HOST, PHASES, TRAINING, MemoryPart, in_gib
from rlhfkit.costs.model_shape import ModelShape
from rlhfkit.costs.run import Run

ENGINE_RUNTIME_BYTES = 1.0 * GIB
"""CUDA graphs and buffers of an engine beside weights, activations and cache."""
BYTES_PER_TOKEN = 40
"""Of an iteration's data on the rank that has it, at most: token ids, log-probs, versions, masks, advantages."""
BYTES_PER_SEQUENCE = 200
"""Of each sequence of the iteration on every rank, at most: rewards, groups, lengths."""


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


def cache_token_bytes(run: Run) -> float:
    """Bytes of a token's keys and values on one GPU of an engine, in layers without a window and with one alike.

    Tensor parallelism splits the key heads, but not beyond one head per GPU; pipeline stages split the layers.
    """
    assert run.engine is not None
    parts = min(run.engine.tensor_parallel, run.policy.cache_heads) * run.engine.pipeline_parallel
    return run.policy.cached * (run.engine.cache_itemsize or run.engine.itemsize) / parts


def kept_tokens(shape: ModelShape, length: float) -> float:
    """Tokens of a sequence whose keys and values a layer keeps, on average: layers with a window no more than that."""
    if not shape.window:
        return length
    windowed = shape.windowed_layers / shape.layers
    return length * (1 - windowed) + min(length, shape.window) * windowed


def cache_sequence_bytes(run: Run, length: float) -> float:
    """Bytes of a sequence's keys and values on one GPU of an engine."""
    return cache_token_bytes(run) * kept_tokens(run.policy, length)


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


def engine_parts(run: Run) -> list[MemoryPart]:
    engine = run.engine
    if engine is None:
        return []
    found = engine_memory(run)
    place = TRAINING if engine.colocated or engine.local else ENGINE
    weights = 0.0 if engine.shares_weights else found.weights
    awake = ("generate",) if engine.colocated else PHASES
    parts = [
        MemoryPart(place, "engine", "weights", weights, ("sync", *awake) if engine.colocated else PHASES),
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


def engine_problems(run: Run) -> list[str]:
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
            f"the engine's weights ({in_gib(found.weights)} on each of {gpus} GPUs) and activations "
            f"({in_gib(found.activations)}) leave no key-value cache in {in_gib(budget)}: raise "
            "tensor_parallel_size or gpu_memory_utilization"
        )
    elif found.longest < 1:
        problems.append(
            f"the engine's key-value cache ({in_gib(found.cache)}) is too small for one sequence of {run.longest:,.0f} "
            f"tokens ({in_gib(cache_sequence_bytes(run, run.longest))}): raise tensor_parallel_size or "
            "gpu_memory_utilization, or lower max_new_tokens"
        )
    return problems
