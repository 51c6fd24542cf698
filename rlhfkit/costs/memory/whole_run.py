"""Every part of a run's memory, and what of it does not fit."""

from collections.abc import Sequence

from rlhfkit.costs.memory.engines import engine_parts, engine_problems, iteration_bytes
from rlhfkit.costs.memory.parts import FRAGMENTATION, HOST, RUNTIME_BYTES, TRAINING, MemoryPart, in_gib, phase_bytes
from rlhfkit.costs.memory.passes import activation_parts
from rlhfkit.costs.memory.states import frozen_models, state_parts, trained_models
from rlhfkit.costs.parallelism import refusals
from rlhfkit.costs.run import Run


def memory_parts(run: Run) -> list[MemoryPart]:
    """Every part of a run's memory."""
    parts = [*state_parts(run), *activation_parts(run), *engine_parts(run)]
    if run.gpu.name != "cpu":
        parts.append(MemoryPart(TRAINING, "process", "CUDA and NCCL", RUNTIME_BYTES))
    if run.engine is not None:
        parts.append(MemoryPart(HOST, "iteration", "samples", iteration_bytes(run)))
    return parts


def memory_problems(run: Run, parts: Sequence[MemoryPart]) -> list[str]:
    """What does not fit, in the order in which a run would meet it."""
    models = [*trained_models(run), *frozen_models(run)]
    refused = [problem for role, shape in models for problem in refusals(role, shape, run.sharding)]
    return [*refused, *engine_problems(run), *_training_problems(run, parts)]


def _training_problems(run: Run, parts: Sequence[MemoryPart]) -> list[str]:
    room = run.gpu.memory * (1 - FRAGMENTATION)
    problems = []
    for phase, total in phase_bytes(parts, TRAINING).items():
        if total <= room:
            continue
        here = [part for part in parts if part.place == TRAINING and phase in part.phases]
        largest = sorted(here, key=lambda part: -part.bytes)[:3]
        named = ", ".join(f"{part.role} {part.part} {in_gib(part.bytes)}" for part in largest)
        problems.append(
            f"{phase}: {in_gib(total)} per GPU, and a {run.gpu.name} has {in_gib(room)}; the largest parts are "
            f"{named}. {_advice(run, phase, largest[0])}"
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
