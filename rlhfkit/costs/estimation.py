"""``estimate``: memory per GPU, a coarse time per iteration and the first thing that does not fit."""

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_warn

from rlhfkit.callbacks import RolloutCallback
from rlhfkit.costs import memory
from rlhfkit.costs.description import RunDescription, sharding_of
from rlhfkit.costs.memory import FRAGMENTATION, PHASES, TRAINING, MemoryPart, memory_problems, phase_bytes
from rlhfkit.costs.model_shape import ModelShape
from rlhfkit.costs.run import GIB, GPU, Run, find_gpu
from rlhfkit.gpus import memory_is_tight
from rlhfkit.modules import PolicyModule, SFTModule
from rlhfkit.strategies import RLHFDeepSpeedStrategy
from rlhfkit.trainer_parts import callbacks_of, datamodule_of
from rlhfkit.validation import check_integer, check_number

if TYPE_CHECKING:
    from rich.console import Group

log = logging.getLogger(__name__)

TRAIN_SHARE, FORWARD_SHARE = 0.40, 0.50
"""Of a GPU's operations that passes with gradient reach, exchanges included (Llama 3 report, 2024, arXiv:2407.21783,
table 4: 0.38 to 0.43), and passes without gradient."""
DECODE_SHARE, DECODE_STEP = 0.60, 1.5e-3
"""Of the memory's bandwidth while an engine decodes, and seconds of its step beside kernels (scheduling, sampling)."""


@dataclass(frozen=True)
class Estimate:
    """What a run needs."""

    run: Run
    """What was estimated, as plain values."""
    memory: list[MemoryPart]
    """Bytes by place, role and part."""
    seconds: dict[str, float]
    """Of an iteration (without an engine: an optimizer step) by phase."""
    iteration_seconds: float
    """Of a whole iteration; less than the sum of its phases where they overlap."""
    problems: list[str]
    """What does not fit, in the order in which the run would meet it."""
    assumptions: list[str] = field(default_factory=list)
    """Sizes that were not given."""

    @property
    def first_problem(self) -> str | None:
        """The first thing that does not fit; ``None``: all fits."""
        return self.problems[0] if self.problems else None

    @property
    def peak(self) -> dict[str, float]:
        """Most bytes in any phase, on one GPU of each kind (training, engine, placed models) and on the host."""
        places = dict.fromkeys(part.place for part in self.memory)
        phases = {place: phase_bytes(self.memory, place) for place in places}
        return {place: max(bytes_.values()) for place, bytes_ in phases.items() if bytes_}

    @property
    def cached_sequences(self) -> float | None:
        """Sequences of mean length that fit into an engine's key-value cache; ``None`` without an engine."""
        return None if self.run.engine is None else memory.engine_memory(self.run).sequences

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON: bytes, seconds, problems."""
        return {
            "gpu": self.run.gpu.name,
            "gpus": self.run.gpus,
            "training_gpus": self.run.sharding.ranks,
            "memory": [asdict(part) | {"phases": list(part.phases)} for part in self.memory],
            "peak": self.peak,
            "cached_sequences": self.cached_sequences,
            "seconds": self.seconds,
            "iteration_seconds": self.iteration_seconds,
            "first_problem": self.first_problem,
            "problems": self.problems,
            "assumptions": self.assumptions,
        }

    def table(self) -> "Group":
        """Tables of memory and time, the problems and the number of GPUs, to be printed by rich."""
        from rich.console import Group
        from rich.table import Table

        sizes = Table("where", "what", "GiB", "in", title=f"Memory of a {self.run.gpu.name}, per GPU")
        for place in self.peak:
            here = [part for part in self.memory if part.place == place and part.bytes]
            for part in sorted(here, key=lambda one: -one.bytes):
                phases = "always" if part.phases == PHASES else ", ".join(part.phases)
                sizes.add_row(place, f"{part.role}: {part.part}", f"{part.bytes / GIB:.2f}", phases)
            totals = phase_bytes(self.memory, place)
            for phase, total in totals.items() if len(set(totals.values())) > 1 else [("always", self.peak[place])]:
                sizes.add_row(place, f"total, {phase}", f"{total / GIB:.2f}", "", style="bold")
            sizes.add_section()
        time = Table("phase", "seconds, about", title=f"Time on {self.run.sharding.ranks} training GPUs")
        for phase, value in self.seconds.items():
            time.add_row(phase, f"{value:,.1f}")
        unit = "an iteration" if self.run.engine is not None else "an optimizer step"
        time.add_row(unit, f"{self.iteration_seconds:,.1f}", style="bold")
        notes = [f"Assumed: {assumption}." for assumption in self.assumptions]
        if self.cached_sequences is not None:
            notes.append(f"Sequences of mean length in an engine's key-value cache: {self.cached_sequences:,.0f}.")
        fits = [f"Everything fits ({FRAGMENTATION:.0%} of a GPU kept free)."]
        notes += [f"Does not fit: {problem}" for problem in self.problems] or fits
        notes.append(f"GPUs in all: {self.run.gpus}, {self.run.sharding.ranks} of them for training.")
        return Group(sizes, time, *notes)


def estimate(
    module: PolicyModule | str,
    data: L.LightningDataModule | None = None,
    rollouts: RolloutCallback | None = None,
    *,
    gpu: str | GPU = "H100",
    strategy: str | Strategy = "auto",
    devices: int = 1,
    num_nodes: int = 1,
    precision: str | int = "bf16-true",
    accumulate_grad_batches: int = 1,
    prompt_tokens: float | None = None,
    answer_tokens: float | None = None,
) -> Estimate:
    """Estimate what a run needs. Nothing is started, no weights are loaded, and no GPU is needed.

    Example::

        found = estimate(GRPOModule("Qwen/Qwen3-8B"), data, rollouts, gpu="H100", strategy="rlhf_zero3", devices=8)
        print(found.first_problem, found.peak, found.run.gpus)

    Args:
        module: The module, or the name of a model for supervised fine-tuning.
        data: Its data; needed by modules that learn from their own samples.
        rollouts: The callback that samples, with its engine; needed by the same.
        gpu: Name of a GPU in :data:`GPUS`, or a :class:`GPU` of your own.
        strategy: As for the Trainer: ``rlhf_zero0`` to ``rlhf_zero3``, with ``_offload``, ``auto``, ``ddp``, or an
            object.
        devices: Training GPUs of a machine.
        num_nodes: Machines with that many; the number of a strategy with ``launcher="ray"`` goes first.
        precision: The Trainer's.
        accumulate_grad_batches: The Trainer's.
        prompt_tokens: Mean tokens of a prompt; ``None``: the data's ``max_prompt_length``, else 512.
        answer_tokens: Mean tokens of an answer; ``None``: the limit. On given data: of the part that is trained.

    Raises:
        TypeError: If the module is none of rlhfkit's.
        ValueError: If a GPU or strategy is unknown, a number is out of range, or the module learns from its own samples
            and data or callback are missing.
    """
    check_integer("devices", devices, minimum=1, why="say how many GPUs the run will have")
    check_integer("num_nodes", num_nodes, minimum=1)
    check_integer("accumulate_grad_batches", accumulate_grad_batches, minimum=1)
    check_number("prompt_tokens", prompt_tokens, above=0, optional=True)
    check_number("answer_tokens", answer_tokens, above=0, optional=True)
    if isinstance(strategy, RLHFDeepSpeedStrategy):
        num_nodes = strategy.own_num_nodes or num_nodes
    if not isinstance(module, str | PolicyModule):
        raise TypeError(f"module must be one of rlhfkit's modules or the name of a model, got {type(module).__name__}")
    described = RunDescription(
        SFTModule(module) if isinstance(module, str) else module,
        data,
        rollouts,
        sharding_of(strategy, devices * num_nodes),
        accumulate_grad_batches,
        prompt_tokens,
        answer_tokens,
    )
    run = described.run(find_gpu(gpu), precision)
    return estimate_run(run, described.assumptions, described.problems)


def estimate_run(run: Run, assumptions: Sequence[str] = (), problems: Sequence[str] = ()) -> Estimate:
    """Estimate a run that is described by plain values; given problems come first."""
    parts, seconds = memory.memory_parts(run), phase_seconds(run)
    sampling, learning = seconds["generate"], seconds["prepare"] + seconds["train"]
    return Estimate(
        run=run,
        memory=parts,
        seconds=seconds,
        iteration_seconds=max(sampling, learning) if run.max_staleness else sampling + learning,
        problems=[*problems, *memory_problems(run, parts)],
        assumptions=list(assumptions),
    )


# ------------------------------------------------------------------------------------------------ time


def forward_flops(shape: ModelShape, tokens: float, length: float) -> float:
    """Operations of a forward pass over ``tokens`` in sequences of ``length`` tokens.

    ``2 P`` a token for P multiplied parameters, and causal attention, L layers with Q numbers of queries:
    ``2 L Q length`` (Kaplan et al., 2020, arXiv:2001.08361, section 2.1; half of it, as it is causal).
    """
    attention = (shape.layer.query + shape.layer.attention_output) * shape.layers * length
    return tokens * (2.0 * shape.active + attention)


def train_flops(shape: ModelShape, tokens: float, length: float, *, gradient_checkpointing: bool) -> float:
    """Operations of forward and backward passes: the backward one takes twice the forward one, one more is recomputed.

    With adapters the frozen weights have no gradient: the backward pass takes as long as the forward one.
    """
    passes = (2 if shape.adapters else 3) + (1 if gradient_checkpointing else 0)
    return passes * forward_flops(shape, tokens, length)


def phase_seconds(run: Run) -> dict[str, float]:
    """Seconds of an iteration by phase: arithmetic and memory traffic over the rates that are usually reached.

    Exchanges of gradients and weights are in :data:`TRAIN_SHARE`. Left out is what takes a small share or is hidden:
    optimizer steps, weight sync, moving states to the host, and models on GPUs of their own, which compute meanwhile.
    """
    rate, length = run.gpu.flops * run.sharding.ranks, run.sequence_tokens
    prepared = sum(forward_flops(shape, run.tokens, length) for shape in run.frozen.values())
    prepared += run.policy_passes * forward_flops(run.policy, run.tokens, length)
    if run.critic is not None:
        prepared += forward_flops(run.critic, run.tokens, length)
    trained = sum(
        train_flops(shape, run.tokens * run.passes, length, gradient_checkpointing=run.gradient_checkpointing)
        for shape in run.trained.values()
    )
    return {
        "generate": generation_seconds(run),
        "prepare": prepared / (rate * FORWARD_SHARE),
        "train": trained / (rate * TRAIN_SHARE),
    }


def generation_seconds(run: Run) -> float:
    """Seconds from the first request to the last answer, with sequences spread evenly over the engines.

    A step takes the larger of memory traffic (active weights and every sequence's keys and values, each read once: Pope
    et al., 2022, arXiv:2211.05102, section 2.1) and arithmetic. As many sequences as fit are decoded at once, for the
    mean number of tokens; then the longest answers go on alone up to the limit.
    """
    engine, shape = run.engine, run.policy
    if engine is None or not run.answer_tokens:
        return 0.0
    room = min(memory.engine_memory(run).sequences, engine.max_sequences)
    if room < 1:
        return math.inf
    share = run.sequences / (engine.count * engine.data_parallel)
    gpus, context = engine.tensor_parallel * engine.pipeline_parallel, run.prompt_tokens + run.answer_tokens / 2

    def step(sequences: float) -> float:
        weights = min(shape.parameters, shape.active * sequences) * memory.engine_itemsize(run) / engine.tensor_parallel
        traffic = weights + sequences * memory.cache_sequence_bytes(run, context)
        arithmetic = forward_flops(shape, sequences, 2 * context) / (gpus * run.gpu.flops * FORWARD_SHARE)
        return max(traffic / (run.gpu.bandwidth * DECODE_SHARE), arithmetic) + DECODE_STEP

    batch = min(share, room)
    decode = share / batch * run.answer_tokens * step(batch)
    longest = (run.max_answer_tokens - run.answer_tokens) * step(1.0)
    prompts = share / run.group_size * forward_flops(shape, run.prompt_tokens, run.prompt_tokens)  # once a group
    return decode + longest + prompts / (gpus * run.gpu.flops * FORWARD_SHARE)


# ------------------------------------------------------------------------------------------------ before training


class MemoryCheck(L.Callback):
    """Warns before training if the run may not fit into its GPUs, with what needs the memory; on GPUs only.

    ``rlhfkit fit`` adds it. From 90 % of the free memory on it is uncertain whether the run fits, as
    :func:`~rlhfkit.costs.estimate` is 10 to 15 % off, so nothing is refused; weights that exceed a GPU are an error of
    the module.

    Example::

        trainer = L.Trainer(strategy="rlhf_zero2", devices=8, callbacks=[MemoryCheck(), rollouts])
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Estimate and warn. Lightning calls this before modules build their networks."""
        device = trainer.strategy.root_device
        if stage != "fit" or device.type != "cuda" or not isinstance(pl_module, PolicyModule):
            return
        cuda: Any = torch.cuda  # has no types
        free, _total = cuda.mem_get_info(device)
        found = memory_warning(trainer, pl_module, str(cuda.get_device_properties(device).name), free)
        if found is not None:
            rank_zero_warn(found)


def estimate_of(trainer: L.Trainer, module: PolicyModule, gpu: GPU) -> Estimate | None:
    """Estimate the run of a Trainer; ``None``: the formulas do not describe its module, data or strategy."""
    rollouts = [one for one in callbacks_of(trainer) if isinstance(one, RolloutCallback)]
    try:
        return estimate(
            module,
            datamodule_of(trainer),
            rollouts[0] if rollouts else None,
            gpu=gpu,
            strategy=trainer.strategy,
            devices=trainer.num_devices,
            num_nodes=trainer.num_nodes,
            precision=trainer.precision,
            accumulate_grad_batches=trainer.accumulate_grad_batches,
        )
    except (TypeError, ValueError) as error:
        log.info("nothing is estimated: %s", error)
        return None


def memory_warning(trainer: L.Trainer, module: PolicyModule, gpu: str, free: float) -> str | None:
    """Say that a run comes near the ``free`` bytes of each of its GPUs; ``None``: it does not, or it is unknown."""
    found = estimate_of(trainer, module, GPU(name=gpu, memory=free, flops=1.0, bandwidth=1.0))  # no times are needed
    if found is None:
        return None
    phases = phase_bytes(found.memory, TRAINING)
    fullest = max(phases, key=lambda phase: phases[phase])
    here = [part for part in found.memory if part.place == TRAINING and fullest in part.phases]
    return memory_is_tight({f"{part.role}: {part.part}": part.bytes for part in here}, gpu, free)
