"""Bytes of activations while a run computes forward and backward passes, per GPU."""

from rlhfkit.costs.memory.activations import backward_bytes, head_bytes, inference_bytes, layer_bytes, saved_bytes
from rlhfkit.costs.memory.parts import HOST, TRAINING, MemoryPart
from rlhfkit.costs.memory.states import frozen_models, micro_batch_gradient_bytes, trained_models
from rlhfkit.costs.model_shape import ModelShape
from rlhfkit.costs.parallelism import exchange_bytes, joined_bytes, on_rank, repeated_keys, trained_on_rank
from rlhfkit.costs.run import Run


def activation_parts(run: Run) -> list[MemoryPart]:
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
        if not run.gradient_checkpointing:
            saved += adapted_expert_bytes(run, shape)
        parts.append(MemoryPart(TRAINING, role, "activations", saved, ("train",)))
        if away:
            parts.append(MemoryPart(HOST, role, "activations", away, ("train",)))
        if residual != compute:
            cast = compute * (on_rank(shape, shape.parameters, sharding.tensor) - shape.quantized)
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


def adapted_expert_bytes(run: Run, shape: ModelShape) -> float:
    """Bytes of the copies of experts to which peft has added their adapters, until the backward pass of the layer."""
    return run.precision.compute * shape.adapted_experts


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
    moment += micro_batch_gradient_bytes(run, trained_on_rank(shape, sharding.tensor))
    if run.gradient_checkpointing:
        moment += adapted_expert_bytes(run, shape) / shape.layers
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
