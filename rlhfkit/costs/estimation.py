"""``estimate``: memory per GPU, time per iteration and the first thing that does not fit, before anything starts."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.strategies import Strategy

from rlhfkit.callbacks import RolloutCallback
from rlhfkit.costs.description import Lengths, described_run
from rlhfkit.costs.hardware import GIB, GPU, Efficiency, find_gpu
from rlhfkit.costs.long_rows import LongestRow, longest_cached, longest_row, longest_rows, suggestion
from rlhfkit.costs.memory.engines import engine_memory
from rlhfkit.costs.memory.parts import ENGINE, FRAGMENTATION, HOST, PHASES, TRAINING, MemoryPart, phase_bytes
from rlhfkit.costs.memory.placed import placed_parts, placed_problems, places
from rlhfkit.costs.memory.whole_run import memory_parts, memory_problems
from rlhfkit.costs.run import Run
from rlhfkit.costs.seconds import (
    checkpoint_seconds,
    exposed_seconds,
    iteration_seconds,
    phase_seconds,
    placed_seconds,
)
from rlhfkit.modules import PolicyModule
from rlhfkit.validation import check_integer, check_number

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table


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
    checkpoint_seconds: float
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
        """Most bytes at each place in any phase: on a training GPU, an engine's GPU, in the host's memory per rank."""
        totals = {place: phase_bytes(self.memory, place) for place in self._places}
        return {place: max(phases.values()) for place, phases in totals.items() if phases}

    @property
    def _places(self) -> list[str]:
        return [TRAINING, ENGINE, *places(self.memory), HOST]

    @property
    def hidden(self) -> dict[str, float]:
        """Of each placed model, the share of its seconds that other work of the iteration hides."""
        exposed = exposed_seconds(self.run)
        return {role: 1.0 - exposed[role] / seconds for role, seconds in placed_seconds(self.run).items()}

    @property
    def cached_sequences(self) -> float | None:
        """Sequences of mean length that fit into an engine's key-value cache; ``None`` without an engine."""
        return None if self.run.engine is None else engine_memory(self.run).sequences

    @cached_property
    def longest_row(self) -> LongestRow:
        """The longest row that the training GPUs can compute, with the run's sequence and tensor ranks."""
        return longest_row(self.run)

    @cached_property
    def longest_rows(self) -> list[LongestRow]:
        """The same for every division of the training GPUs into forward groups."""
        return longest_rows(self.run)

    @property
    def longest_cached(self) -> int | None:
        """Tokens of the longest sequence that an engine's key-value cache holds; ``None`` without one."""
        return longest_cached(self.run)

    @property
    def suggestion(self) -> str | None:
        """The smallest forward groups that compute the longest sequence; ``None`` if those of the run do."""
        return suggestion(self.run, self.longest_rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON: bytes, seconds, problems; infinite times are ``None``."""
        return {
            "gpu": self.run.gpu.name,
            "ranks": self.run.sharding.ranks,
            "gpus": self.run.gpus,
            "hidden": self.hidden,
            "memory": [asdict(part) | {"phases": list(part.phases)} for part in self.memory],
            "phases": {
                place: phase_bytes(self.memory, place) for place in self._places if phase_bytes(self.memory, place)
            },
            "peak": self.peak,
            "cached_sequences": self.cached_sequences,
            "sequence_parallel_size": self.run.sharding.sequence,
            "tensor_parallel_size": self.run.sharding.tensor,
            "longest_row": asdict(self.longest_row),
            "longest_rows": [asdict(row) for row in self.longest_rows],
            "longest_cached": self.longest_cached,
            "suggestion": self.suggestion,
            "seconds": {phase: _finite(value) for phase, value in self.seconds.items()},
            "iteration_seconds": _finite(self.iteration_seconds),
            "checkpoint_seconds": _finite(self.checkpoint_seconds),
            "first_problem": self.first_problem,
            "problems": self.problems,
            "assumptions": self.assumptions,
        }

    def table(self) -> "Group":
        """Tables of memory and time and the problems, to be printed by rich."""
        from rich.console import Group
        from rich.table import Table

        memory = Table(title=f"Memory, GiB, {self.run.gpu.name} ({self.run.gpu.memory / GIB:.1f} GiB)")
        for column in ("where", "what", "GiB", "in"):
            memory.add_column(column, justify="right" if column == "GiB" else "left")
        for place in self._places:
            here = [part for part in self.memory if part.place == place and part.bytes]
            for part in sorted(here, key=lambda one: -one.bytes):
                phases = "always" if part.phases == PHASES else ", ".join(part.phases)
                memory.add_row(place, f"{part.role}: {part.part}", f"{part.bytes / GIB:.2f}", phases)
            totals = phase_bytes(self.memory, place)
            if len(totals) == len(PHASES) and len(set(totals.values())) == 1:
                totals = {"always": next(iter(totals.values()))}
            for phase, total in totals.items():
                memory.add_row(place, f"total, {phase}", f"{total / GIB:.2f}", "", style="bold")
            memory.add_section()
        unit = "an iteration" if self.run.engine is not None else "an optimizer step"
        time = Table(title=f"Seconds, {self.run.sharding.ranks} training GPUs")
        time.add_column("phase")
        time.add_column("seconds", justify="right")
        for phase, value in self.seconds.items():
            time.add_row(phase, f"{value:,.2f}")
        time.add_section()
        time.add_row(unit, f"{self.iteration_seconds:,.2f}", style="bold")
        time.add_row("a checkpoint", f"{self.checkpoint_seconds:,.2f}")
        notes = [f"Assumed: {assumption}." for assumption in self.assumptions]
        if self.cached_sequences is not None:
            notes.append(f"Sequences of mean length in an engine's key-value cache: {self.cached_sequences:,.0f}.")
        for model in self.run.placed:
            seconds = placed_seconds(self.run)[model.label]
            notes.append(
                f"The {model.label} has {model.total_gpus} GPU(s) and computes {seconds:,.2f} s, "
                f"{self.hidden[model.label]:.0%} of which other work hides."
            )
        notes += self._notes_of_rows()
        notes += [f"Does not fit: {problem}" for problem in self.problems] or [
            f"Everything fits ({FRAGMENTATION:.0%} of a GPU kept free)."
        ]
        notes.append(f"GPUs in all: {self.run.gpus}, {self.run.sharding.ranks} of them for training.")
        tables = [memory, time, *([self._table_of_rows()] if len(self.longest_rows) > 1 else [])]
        return Group(*tables, *notes)

    def _table_of_rows(self) -> "Table":
        """The longest row by sequence ranks (lines) and tensor ranks (columns)."""
        from rich.table import Table

        tensors = sorted({row.tensor for row in self.longest_rows})
        found = {(row.sequence, row.tensor): row for row in self.longest_rows}
        table = Table(title="Longest row that fits, tokens")
        table.add_column("sequence ranks", justify="right")
        for tensor in tensors:
            table.add_column("no tensor ranks" if tensor == 1 else f"{tensor} tensor ranks", justify="right")
        for sequence in sorted({row.sequence for row in self.longest_rows}):
            line = []
            for tensor in tensors:
                row = found.get((sequence, tensor))
                kind = (
                    f" {row.sequence_parallel}" if row and sequence > 1 and row.sequence_parallel != "ulysses" else ""
                )
                text = "-" if row is None else f"{row.tokens:,}{kind}"
                own = (sequence, tensor) == (self.run.sharding.sequence, self.run.sharding.tensor)
                line.append(f"[bold]{text}[/bold]" if own else text)
            table.add_row(str(sequence), *line)
        return table

    def _notes_of_rows(self) -> list[str]:
        """What limits the length of rows, and which sizes would compute the longest one."""
        row = self.longest_row
        notes = [f"Longest row that fits into the training GPUs: {row.tokens:,} tokens (most of it: {row.limit})."]
        if self.longest_cached is not None:
            notes.append(f"Longest sequence that fits into an engine's cache: {self.longest_cached:,} tokens.")
        return notes + ([f"For longer rows: {self.suggestion}."] if self.suggestion else [])


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def estimate(
    module: PolicyModule | Mapping[str, Any] | str,
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
    answer_spread: float | None = None,
    score_seconds: float = 0.0,
    efficiency: Efficiency | None = None,
    gpus_per_machine: int = 8,
) -> Estimate:
    """Estimate memory per GPU and time per iteration of a run, and say what does not fit, without starting it.

    No weights are loaded and no GPU is needed. Activations are within 15 % of measured runs on CPUs for the usual
    decoder layers (``benchmarks/estimate.py``); times rest on assumed shares of the vendors' peaks, see
    :class:`~rlhfkit.costs.Efficiency`.

    Example::

        found = estimate(module, data, rollouts, gpu="H100", strategy="rlhf_zero3", devices=8)
        print(found.first_problem, found.seconds)

    Args:
        module: A module of rlhfkit; ``class_path`` and ``init_args`` of one, as in a configuration; or the name of a
            model, for supervised fine-tuning.
        data: The DataModule: sizes of iterations and micro-batches.
        rollouts: The callback: its engine and sampling. Needed by modules that learn from their own samples.
        gpu: Name of a GPU (:data:`~rlhfkit.costs.GPUS`), or a :class:`~rlhfkit.costs.GPU` of your own.
        strategy: As for the Trainer: ``rlhf_zero0`` to ``rlhf_zero3``, with ``_offload``, ``auto``, ``ddp``, or an
            object.
        devices: Training GPUs of a machine.
        num_nodes: Machines with that many.
        precision: The Trainer's.
        accumulate_grad_batches: The Trainer's.
        prompt_tokens: Mean tokens of a prompt; ``None``: the data's ``max_prompt_length``, else 512.
        answer_tokens: Mean tokens of an answer; ``None``: the limit. On given data: of the part that is trained.
        answer_spread: Standard deviation of the logarithm of the answers' lengths; ``None``: 0.6, or 0 when every
            answer has the greatest length.
        score_seconds: Seconds that rewards of an iteration take beyond what overlaps with generation.
        efficiency: Shares of the GPU's peaks that are reached; ``None``: the defaults.
        gpus_per_machine: Ranks whose exchanges do not use the network.

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
    check_number("answer_spread", answer_spread, minimum=0, optional=True)
    run, assumptions, problems = described_run(
        module,
        data,
        rollouts,
        strategy=strategy,
        devices=devices,
        num_nodes=num_nodes,
        precision=precision,
        accumulate_grad_batches=accumulate_grad_batches,
        gpu=find_gpu(gpu),
        lengths=Lengths(prompt_tokens=prompt_tokens, answer_tokens=answer_tokens, answer_spread=answer_spread),
        score_seconds=score_seconds,
        efficiency=efficiency or Efficiency(),
        gpus_per_machine=gpus_per_machine,
    )
    return estimate_run(run, assumptions=assumptions, problems=problems)


def estimate_run(run: Run, *, assumptions: list[str] | None = None, problems: list[str] | None = None) -> Estimate:
    """Estimate a run that is described by plain values.

    Args:
        run: The run.
        assumptions: What its description assumed.
        problems: Sizes in its description that contradict one another; they come first.
    """
    parts = [*memory_parts(run), *placed_parts(run)]
    return Estimate(
        run=run,
        memory=parts,
        seconds=phase_seconds(run),
        iteration_seconds=iteration_seconds(run),
        checkpoint_seconds=checkpoint_seconds(run),
        problems=[*(problems or []), *memory_problems(run, parts), *placed_problems(run, parts)],
        assumptions=list(assumptions or []),
    )
