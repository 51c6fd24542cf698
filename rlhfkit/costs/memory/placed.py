"""Bytes of models on GPUs of their own: a reference, reward model, teacher or critic, frozen or learning there."""

import dataclasses
from collections.abc import Sequence

from rlhfkit.costs.hardware import GIB
from rlhfkit.costs.memory.activations import inference_bytes
from rlhfkit.costs.memory.parts import ENGINE, FRAGMENTATION, RUNTIME_BYTES, TRAINING, MemoryPart, phase_bytes
from rlhfkit.costs.memory.whole_run import memory_parts
from rlhfkit.costs.model_shape import ModelShape
from rlhfkit.costs.run import PlacedModel, Run, Sharding


def place_of(model: PlacedModel) -> str:
    """What the GPUs of a model are called in a report."""
    return f"{model.label} GPU"


def placed_parts(run: Run) -> list[MemoryPart]:
    """Every part of the memory of placed models, per GPU.

    A frozen model: its weights, sharded over the GPUs of a replica (whole layers are gathered one after the other,
    which is in the activations), and one forward pass of ``prepare_tokens``. A critic: what a training rank holds of
    such a model, with the sharding, the types and the optimizer of its own ranks.
    """
    parts = []
    for model in run.placed:
        if model.role == "critic":
            alone = critic_run(run, model)
            found = [part for part in memory_parts(alone) if part.place == TRAINING]
            parts += [dataclasses.replace(part, place=place_of(model)) for part in found]
            continue
        numbers = shape_of(model).parameters
        itemsize, place = run.precision.weights, place_of(model)
        passing = inference_bytes(model.shape, run.prepare_tokens, itemsize=run.precision.compute)
        if model.gpus > 1:
            passing += itemsize * model.shape.backbone / model.shape.layers
        parts.append(MemoryPart(place, model.label, "weights", itemsize * numbers / model.gpus))
        parts.append(MemoryPart(place, model.label, "forward passes", passing))
        if run.gpu.name != "cpu":
            parts.append(MemoryPart(place, "process", "CUDA and NCCL", RUNTIME_BYTES))
    return parts


def shape_of(model: PlacedModel) -> ModelShape:
    """The shape of a placed model, with its own output layer."""
    scalar = model.role in ("reward model", "critic", "frozen critic")
    return model.shape.with_scalar_head() if scalar else model.shape


def critic_run(run: Run, model: PlacedModel) -> Run:
    """The critic as a run of its own, which holds nothing else."""
    sharding = model.sharding or Sharding(ranks=model.gpus, stage=3 if model.gpus > 1 else 2)
    return dataclasses.replace(
        run,
        policy=shape_of(model),
        sharding=sharding,
        precision=model.precision or run.precision,
        optimizer_state=model.optimizer_state or run.optimizer_state,
        critic=None,
        reference=None,
        reward_model=None,
        more_reward_models=(),
        teacher=None,
        more_teachers=(),
        reference_is_policy=False,
        placed=(),
        engine=None,
        offload_training=False,
    )


def placed_problems(run: Run, parts: Sequence[MemoryPart]) -> list[str]:
    """Placed models that do not fit."""
    room, problems = run.gpu.memory * (1 - FRAGMENTATION), []
    for model in run.placed:
        need = max(phase_bytes(parts, place_of(model)).values())
        if need > room:
            problems.append(
                f"the {model.label} needs {need / GIB:.1f} GiB on each of its {model.gpus} GPU(s), and a "
                f"{run.gpu.name} has {room / GIB:.1f} GiB: shard it over more, or lower max_tokens_per_forward"
            )
    return problems


def places(parts: Sequence[MemoryPart]) -> list[str]:
    """The GPUs of placed models in a report, in order."""
    own = [part.place for part in parts if part.place.endswith(" GPU")]
    return [place for place in dict.fromkeys(own) if place not in (TRAINING, ENGINE)]
