"""Seconds of each phase of an iteration on a named GPU: arithmetic, memory traffic and messages over their rates.

Estimates, not measurements: each phase takes the larger of its times for arithmetic and for memory traffic, at the
share of the vendor's peak in :class:`~rlhfkit.costs.hardware.Efficiency`.
"""

import math
from statistics import NormalDist

from rlhfkit.costs.memory.engines import cache_sequence_bytes, engine_itemsize, engine_memory, kept_tokens
from rlhfkit.costs.memory.passes import offloaded_activations
from rlhfkit.costs.memory.placed import shape_of
from rlhfkit.costs.memory.states import frozen_models, moved_bytes, trained_models, whole_weight_bytes
from rlhfkit.costs.memory.whole_run import memory_parts
from rlhfkit.costs.model_shape import ModelShape
from rlhfkit.costs.parallelism import dealt_ranks, on_rank, ring_bytes, tensor_bytes, trained_on_rank, ulysses_bytes
from rlhfkit.costs.run import PlacedModel, Run

_STEPS = 64  # points of the integrals over lengths
HOST_BANDWIDTH = 50e9
"""Bytes per second from and to the host's memory that a rank's share of its cores reaches in an optimizer's step."""


def forward_flops(shape: ModelShape, tokens: float, length: float) -> float:
    """Operations of a forward pass over ``tokens`` in sequences of ``length`` tokens.

    ``2 P`` a token for P multiplied parameters, and causal attention ``2 L Q T`` of a sequence's mean position T / 2
    (scores and values, two operations each): Kaplan et al. (2020, arXiv:2001.08361, section 2.1) and Chowdhery et al.
    (PaLM, 2022, arXiv:2204.02311, appendix B), with half the attention as it is causal.
    """
    layer = shape.layer
    attention = 2.0 * (layer.query + layer.attention_output) * shape.layers * attended(shape, length)
    return tokens * (2.0 * shape.active + attention)


def attended(shape: ModelShape, length: float) -> float:
    """Mean tokens that a token of a sequence attends to, layers with a window included."""
    full = length / 2
    if not shape.window or length <= shape.window:
        return full
    within = shape.window * (1 - shape.window / (2 * length))
    return (full * (shape.layers - shape.windowed_layers) + within * shape.windowed_layers) / shape.layers


def train_flops(shape: ModelShape, tokens: float, length: float, *, gradient_checkpointing: bool) -> float:
    """Operations of forward and backward passes: the backward one takes twice the forward one, one more is recomputed.

    With adapters the frozen weights have no gradient: the backward pass takes as long as the forward one.
    """
    passes = (2 if shape.adapters else 3) + (1 if gradient_checkpointing else 0)
    return passes * forward_flops(shape, tokens, length)


# ------------------------------------------------------------------------------------------------ generation


def survival(run: Run, tokens: float) -> float:
    """Probability that an answer is longer than ``tokens``: lognormal with the run's mean, cut at its limit."""
    if tokens >= run.max_answer_tokens:
        return 0.0
    if tokens <= 0:
        return 1.0
    if not run.answer_spread:
        return float(tokens < run.answer_tokens)
    location = math.log(max(run.answer_tokens, 1e-9)) - run.answer_spread**2 / 2
    return 1.0 - NormalDist().cdf((math.log(tokens) - location) / run.answer_spread)


def decode_step_seconds(run: Run, sequences: float, context: float) -> float:
    """Seconds of one step of an engine that adds a token to each of ``sequences`` of ``context`` tokens.

    The larger of memory traffic (all active weights, the experts that are hit, and every sequence's keys and values,
    each read once: Pope et al., 2022, arXiv:2211.05102, section 2.1) and arithmetic, on ``tensor_parallel`` GPUs, and a
    fixed cost. P pipeline stages work on P parts of the sequences in turn: each reads a P-th of the weights, P times a
    step.
    """
    engine, shape, rates = run.engine, run.policy, run.efficiency
    assert engine is not None
    expert_share = 0.0
    if shape.experts:  # the share of experts that at least one sequence chooses, if they are chosen evenly
        rest = shape.parameters - shape.embedding - shape.head - shape.experts
        chosen = (shape.active - rest - (shape.head or shape.embedding)) / shape.experts
        chosen = min(max(chosen, 1e-6), 1.0)
        expert_share = 1.0 - (1.0 - chosen) ** max(sequences * engine.data_parallel, 1.0)
    read = shape.parameters - shape.experts + shape.experts * expert_share / engine.data_parallel
    weights = read * engine_itemsize(run) / engine.tensor_parallel
    traffic = weights + sequences * cache_sequence_bytes(run, context)
    memory_seconds = traffic / (run.gpu.bandwidth * rates.decode_bandwidth)
    attention = 2.0 * (shape.layer.query + shape.layer.attention_output) * shape.layers * kept_tokens(shape, context)
    operations = sequences * (2.0 * shape.active + attention)
    gpus = engine.tensor_parallel * engine.pipeline_parallel
    arithmetic = operations / (gpus * run.gpu.flops * rates.forward_flops)
    return max(memory_seconds, arithmetic) + rates.decode_step


def generation_seconds(run: Run) -> float:
    """Seconds from the first request to the last answer, with sequences spread evenly over the engines.

    While more wait than fit, an engine decodes as many as its cache and ``max_sequences`` allow; then the batch thins
    out as :func:`survival` says until the longest answer ends. Prompts are computed once a group (prefix caching).
    """
    engine = run.engine
    if engine is None:
        return 0.0
    count = engine.count * engine.data_parallel if not engine.local else run.sharding.ranks
    share = run.sequences / count
    if share <= 0 or not run.answer_tokens:
        return 0.0
    room = min(engine_memory(run).sequences, engine.max_sequences)
    if room < 1:
        return math.inf
    batch = min(share, room)
    context = run.prompt_tokens + run.answer_tokens / 2
    steady = (share - batch) * run.answer_tokens / batch * decode_step_seconds(run, batch, context)
    end = float(run.max_answer_tokens) if run.answer_spread else min(run.answer_tokens, run.max_answer_tokens)
    width = end / _STEPS
    tail = 0.0
    for index in range(_STEPS):
        position = (index + 0.5) * width
        alive = batch * survival(run, position)
        if alive * count < 0.5:  # nobody is expected to be left
            break
        tail += width * decode_step_seconds(run, max(alive, 1.0), run.prompt_tokens + position)
    return prefill_seconds(run) + steady + tail


def prefill_seconds(run: Run) -> float:
    """Seconds in which the engines compute the prompts, each once a group."""
    engine = run.engine
    if engine is None:
        return 0.0
    each = engine.tensor_parallel * engine.pipeline_parallel * engine.data_parallel
    gpus = run.sharding.ranks if engine.local else engine.count * each
    prompts = run.sequences / run.group_size
    operations = forward_flops(run.policy, prompts * run.prompt_tokens, run.prompt_tokens)
    return operations / (gpus * run.gpu.flops * run.efficiency.forward_flops)


# ------------------------------------------------------------------------------------------------ training


def prepare_seconds(run: Run) -> float:
    """Seconds of forward passes before the first update: old, reference, value, reward and teacher models."""
    if run.engine is None:
        return 0.0
    operations = sum(
        share * forward_flops(shape, run.tokens, run.sequence_tokens) for shape, share in _forward_passes(run)
    )
    return operations / (run.sharding.ranks * run.gpu.flops * run.efficiency.forward_flops)


def placed_seconds(run: Run) -> dict[str, float]:
    """Seconds in which each placed model computes an iteration, hidden or not; of a critic values and updates."""
    found: dict[str, float] = {}
    for model in run.placed:
        rate = model.total_gpus * run.gpu.flops
        passes = 1.0 if run.engine is not None else float(run.passes)
        operations = passes * forward_flops(shape_of(model), run.tokens, run.sequence_tokens)
        found[model.label] = operations / (rate * run.efficiency.forward_flops)
        if model.role == "critic":
            found[model.label] += critic_seconds(run, model)
    return found


def critic_seconds(run: Run, model: PlacedModel) -> float:
    """Seconds of the updates of a critic on GPUs of its own, while the policy's are computed."""
    tokens, recompute = run.tokens * run.passes, run.gradient_checkpointing
    operations = train_flops(shape_of(model), tokens, run.sequence_tokens, gradient_checkpointing=recompute)
    return operations / (model.total_gpus * run.gpu.flops * run.efficiency.train_flops)


def exposed_seconds(run: Run) -> dict[str, float]:
    """Seconds of placed models that nothing hides, by role.

    The reference and the teacher are asked for all rows when these are there, and compute while the ranks compute old
    log-probs, and so does a critic its values; a reward model is waited for. With ``asked_by_group`` they compute while
    others are sampled: groups finish all through generation, so what is left at its end is one forward pass of each
    replica, or what the model is slower than the engines. A critic learns while the policy does.
    """
    if run.engine is None:
        return placed_seconds(run)
    exposed: dict[str, float] = {}
    own = prepare_seconds(run)
    for model in run.placed:
        seconds = placed_seconds(run)[model.label]
        if model.role == "critic":
            updates = critic_seconds(run, model)
            exposed[model.label] = max(0.0, seconds - updates - own) + max(0.0, updates - train_seconds(run))
            continue
        left = seconds
        if run.asked_by_group:
            last = seconds * min(1.0, run.prepare_tokens * model.replicas / run.tokens)
            left = max(last, seconds - generation_seconds(run))
        exposed[model.label] = left if model.role == "reward model" else max(0.0, left - own)
    return exposed


def _forward_passes(run: Run) -> list[tuple[ModelShape, float]]:
    """Each model that is computed without gradient, and for which share of an iteration's tokens."""
    teachers = 1 + len(run.more_teachers)  # each computes its own prompts
    found = [(shape, 1.0 / teachers if role.startswith("teacher") else 1.0) for role, shape in frozen_models(run)]
    found += [(run.policy, 1.0)] if run.reference_is_policy else []
    if run.engine is None:
        return found
    if run.old_logprobs or run.later_logprobs:
        one_update = run.updates == run.passes  # per pass: the first one gives the old log-probs of the others
        every = run.old_logprobs or (run.passes > 1 and not one_update)
        found.append((run.policy, 1.0 if every else 1.0 - run.passes / run.updates))
    return found + [(shape, 1.0) for role, shape in trained_models(run) if role == "critic"]


def train_seconds(run: Run) -> float:
    """Seconds of arithmetic of all updates, policy and critic; a teacher's or reference's passes without an engine.

    Tiles of feed-forward blocks are computed once more: 2 operations for each of their numbers, 3 H I a layer.
    """
    operations = sum(
        train_flops(
            shape, run.tokens * run.passes, run.sequence_tokens, gradient_checkpointing=run.gradient_checkpointing
        )
        for _, shape in trained_models(run)
    )
    for _, shape in trained_models(run):
        if run.tile(shape) is not None:
            block = (3 if shape.layer.gated else 2) * shape.layer.hidden * shape.layer.intermediate
            operations += 2.0 * run.tokens * run.passes * shape.layers * block
    seconds = operations / (run.sharding.ranks * run.gpu.flops * run.efficiency.train_flops)
    if run.engine is None:
        more = sum(
            share * forward_flops(shape, run.tokens, run.sequence_tokens) for shape, share in _forward_passes(run)
        )
        seconds += more / (run.sharding.ranks * run.gpu.flops * run.efficiency.forward_flops)
    return seconds


def collective_bandwidth(run: Run, ranks: int | None = None) -> float:
    """Bytes per second and GPU of collectives over so many neighbours: the network's if they are on several machines.

    Args:
        run: The run.
        ranks: How many consecutive ranks; ``None``: all.
    """
    within = (ranks or run.sharding.ranks) <= run.gpus_per_machine
    return (run.gpu.link if within else min(run.gpu.link, run.gpu.network)) * run.efficiency.link


def sequence_seconds(run: Run) -> float:
    """Seconds in which attention waits for numbers of other sequence ranks, training and preparation together.

    Ulysses waits for all it exchanges. A ring waits for what takes longer to send than the attention of the block
    before takes to compute, which is twice as long in the backward pass. The hybrid does the first among neighbours.
    """
    sharding, rates = run.sharding, run.efficiency
    if sharding.sequence == 1:
        return 0.0
    seconds = 0.0
    for shape, tokens, forwards, backwards in _grouped_passes(run):
        layer = shape.layer
        neighbours, places = dealt_ranks(layer, sharding)
        exchanged = ulysses_bytes(layer, tokens, sharding, itemsize=run.precision.compute)
        seconds += (
            shape.layers * (forwards + backwards) * exchanged / collective_bandwidth(run, neighbours * sharding.tensor)
        )
        numbers = 2.0 * (layer.query + layer.attention_output) / sharding.tensor
        computing = tokens * numbers * attended(shape, run.sequence_tokens) / (run.gpu.flops * rates.train_flops)
        for passes, backward in ((forwards, False), (backwards, True)):
            sending = ring_bytes(layer, tokens, sharding, itemsize=run.precision.compute, backward=backward)
            hidden = (2 if backward else 1) * computing * (places - 1) / places
            waiting = sending / collective_bandwidth(run, sharding.group) - hidden
            seconds += shape.layers * passes * max(0.0, waiting)
    return seconds


def tensor_seconds(run: Run) -> float:
    """Seconds of tensor parallelism's all-reduces, which nothing hides, in training and preparation together."""
    sharding = run.sharding
    if sharding.tensor == 1:
        return 0.0
    bandwidth = collective_bandwidth(run, sharding.tensor)
    moved = sum(
        shape.layers * (forwards + backwards) * tensor_bytes(layer, tokens, sharding, itemsize=run.precision.compute)
        for shape, tokens, forwards, backwards in _grouped_passes(run)
        for layer in (shape.layer,)
    )
    return moved / bandwidth


def activation_seconds(run: Run) -> float:
    """Seconds in which inputs of layers go to the host's memory and come back, which nothing hides."""
    steps = run.tokens * run.passes / (run.micro_batch_tokens * run.sharding.data)
    moved = sum(offloaded_activations(run, shape) for _, shape in trained_models(run))
    return 2 * steps * moved / run.efficiency.host


def _grouped_passes(run: Run) -> list[tuple[ModelShape, float, float, float]]:
    """Each model, the tokens of an iteration that a rank computes of it, and its forward and backward passes."""
    own = run.tokens / (run.sharding.data * run.sharding.sequence)
    forwards = 2.0 if run.gradient_checkpointing else 1.0
    passes = [(shape, own * run.passes, forwards, 1.0) for _, shape in trained_models(run)]
    return passes + [(shape, own * share, 1.0, 0.0) for shape, share in _forward_passes(run)]


def communication_seconds(run: Run) -> float:
    """Seconds of exchanged gradients and weights that computation does not hide.

    Bytes per rank: Rajbhandari et al. (2020, arXiv:1910.02054, section 7). Up to stage 1 gradients are reduced once an
    update (``2 P``: reduce-scatter and all-gather), at stage 2 in each micro-batch (``P``) and weights gathered once an
    update (``P``); stage 3 moves ``3 P`` in each micro-batch, for ``2 P`` of which offloaded shards leave the host.
    """
    sharding = run.sharding
    moved = fetched = 0.0
    for _, shape in trained_models(run):
        trained = trained_on_rank(shape, sharding.tensor) * run.of_trained(shape).precision.weights
        whole = whole_weight_bytes(run, on_rank(shape, shape.parameters, sharding.tensor), shape.quantized)
        if sharding.stage == 3:
            fetched += run.micro_batches * 2 * whole / sharding.shards if sharding.offload_parameters else 0.0
            moved += run.micro_batches * (2 * whole + trained)
        elif sharding.stage == 2:
            moved += run.micro_batches * trained + run.updates * trained
        else:
            moved += 2 * run.updates * trained
    moved *= (sharding.shards - 1) / sharding.shards
    seconds = moved / collective_bandwidth(run) + fetched / run.efficiency.host
    return seconds * run.efficiency.exposed_communication


def optimizer_seconds(run: Run) -> float:
    """Seconds of the optimizer's steps.

    They read gradients once, read and write main weights and states once, and compute what Muon computes of matrices.
    With states in the host's memory gradients go there, and weights come back.
    """
    sharding, seconds = run.sharding, 0.0
    for _, shape in trained_models(run):
        own = run.of_trained(shape)
        numbers = trained_on_rank(shape, sharding.tensor)
        numbers /= sharding.shards if (sharding.stage or 0) >= 1 else 1
        moved = numbers * (3 * own.precision.main_weights + 2 * own.state_bytes(shape))
        seconds += moved / (HOST_BANDWIDTH if sharding.offload_optimizer else run.gpu.bandwidth)
        seconds += numbers * run.orthogonal_flops(shape) / (run.gpu.flops * run.efficiency.train_flops)
        if sharding.offload_optimizer:
            seconds += numbers * 2 * own.precision.weights / run.efficiency.host
    return run.updates * seconds


def weight_sync_seconds(run: Run) -> float:
    """Seconds of copying the policy, or its adapters, to the engines: once over the slowest link on the way."""
    engine = run.engine
    if engine is None:
        return 0.0
    numbers = run.policy.adapters if engine.takes_adapter and run.policy.adapters else run.policy.parameters
    moved = numbers * run.precision.weights
    seconds = moved / (run.gpu.link * run.efficiency.link) if engine.colocated else 0.0
    if not engine.colocated and not engine.local:
        seconds = moved / (min(run.gpu.link, run.gpu.network) * run.efficiency.link)
    if run.sharding.stage == 3 and run.sharding.ranks > 1:
        seconds += moved / collective_bandwidth(run)
    elif run.sharding.tensor > 1:
        seconds += moved / collective_bandwidth(run, run.sharding.tensor)
    return seconds


def offload_seconds(run: Run) -> float:
    """Seconds in which training states leave the GPU before generation and come back after it."""
    return 2 * moved_bytes(memory_parts(run)) / run.efficiency.host


def checkpoint_seconds(run: Run) -> float:
    """Seconds of saving a checkpoint: weights, main weights and states of what is trained, each rank its share."""
    writers, size = run.sharding.ranks if run.sharding.stage is not None else 1, 0.0
    for _, shape in trained_models(run):
        own = run.of_trained(shape)
        main = own.precision.main_weights if own.precision.main_weights != own.precision.weights else 0
        size += shape.trained * (own.precision.weights + main + own.state_bytes(shape))
    return size / writers / run.efficiency.storage


def phase_seconds(run: Run) -> dict[str, float]:
    """Seconds of an iteration by phase; a checkpoint is not part of it."""
    together = {"sequence_parallel": sequence_seconds(run)} if run.sharding.sequence > 1 else {}
    together |= {"offload_activations": activation_seconds(run)} if run.offload_activations else {}
    together |= {"tensor_parallel": tensor_seconds(run)} if run.sharding.tensor > 1 else {}
    training = {
        "train": train_seconds(run),
        **together,
        "communication": communication_seconds(run),
        "optimizer": optimizer_seconds(run),
    }
    if run.engine is None:
        return training
    moving = {"offload": offload_seconds(run)} if run.offload_training else {}
    exposed = exposed_seconds(run)
    scored = sum(exposed.pop(model.label) for model in run.placed if model.role == "reward model")
    return moving | {
        "generate": generation_seconds(run),
        "score": run.score_seconds + scored,
        "prepare": prepare_seconds(run),
        **({"placed_models": sum(exposed.values())} if run.placed else {}),
        **training,
        "weight_sync": weight_sync_seconds(run),
    }


def iteration_seconds(run: Run) -> float:
    """Seconds of an iteration: the sum of its phases, or with ``max_staleness`` the longer of the two sides."""
    phases = phase_seconds(run)
    ahead = phases.pop("generate", 0.0) + phases.pop("score", 0.0)
    learning = sum(phases.values())
    return max(ahead, learning, *placed_seconds(run).values()) if run.max_staleness else ahead + learning
