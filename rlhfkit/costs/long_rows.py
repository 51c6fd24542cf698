"""The longest row that fits into the training GPUs, for every division of the ranks into forward groups.

A row is never divided over micro-batches. So what a run can train on is bounded by what one row alone needs, which only
more sequence or tensor ranks make less; more data-parallel ranks do not. Of preference pairs both rows are in one
micro-batch, and tokens are those of each.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from rlhfkit.costs.hardware import GIB
from rlhfkit.costs.memory.engines import cache_sequence_bytes, engine_memory
from rlhfkit.costs.memory.parts import FRAGMENTATION, TRAINING, phase_bytes
from rlhfkit.costs.memory.states import frozen_models, trained_models
from rlhfkit.costs.memory.whole_run import memory_parts
from rlhfkit.costs.parallelism import refusals
from rlhfkit.costs.run import Run, Sharding
from rlhfkit.mesh import SequenceParallel

MOST_TOKENS = 2**28
"""No longer row is looked for."""


@dataclass(frozen=True)
class LongestRow:
    """The longest row of one division of the ranks."""

    sequence: int
    """``sequence_parallel_size``."""
    tensor: int
    """``tensor_parallel_size``."""
    sequence_parallel: SequenceParallel
    """The hybrid where the number of heads rules Ulysses out."""
    tokens: int
    """0: weights and states alone do not fit."""
    limit: str
    """The largest part of the memory when it is full."""


def longest_row(run: Run) -> LongestRow:
    """The most tokens of a row that is a micro-batch of its own, of a run as it is."""
    tokens = _largest(lambda count: _fits(with_row(run, count)))
    parts = [part for part in memory_parts(with_row(run, max(tokens, 1))) if part.place == TRAINING]
    totals = phase_bytes(parts, TRAINING)
    fullest = max(totals, key=lambda phase: totals[phase])
    largest = max((part for part in parts if fullest in part.phases), key=lambda part: part.bytes)
    sharding = run.sharding
    limit = f"{largest.role} {largest.part} {largest.bytes / GIB:.1f} GiB"
    return LongestRow(sharding.sequence, sharding.tensor, sharding.sequence_parallel, tokens, limit)


def longest_rows(run: Run) -> list[LongestRow]:
    """Of every division of the ranks that is not refused, the smallest groups first, within a group tensor ranks last.

    Tensor ranks stay within a machine, and need a DeepSpeed engine.
    """
    return [longest_row(replace(run, sharding=sharding)) for sharding in divisions(run)]


def divisions(run: Run) -> list[Sharding]:
    """Ways to divide the ranks of a run into forward groups, see :func:`longest_rows`."""
    ranks, most = run.sharding.ranks, 1 if run.sharding.stage is None else run.gpus_per_machine
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    pairs = [
        (sequence, tensor)
        for tensor in sizes
        for sequence in sizes
        if tensor <= most and ranks % (sequence * tensor) == 0
    ]
    found = []
    for sequence, tensor in sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair[1])):
        kinds: tuple[SequenceParallel, ...] = (run.sharding.sequence_parallel, "hybrid")
        for kind in kinds:
            sharding = replace(run.sharding, sequence=sequence, tensor=tensor, sequence_parallel=kind)
            if not refused(run, sharding):
                found.append(sharding)
                break
    return found


def smallest_division(run: Run) -> Sharding | None:
    """The smallest forward groups that compute the run's longest sequence; ``None``: none do."""
    for sharding in divisions(run):
        if _fits(with_row(replace(run, sharding=sharding), math.ceil(run.longest))):
            return sharding
    return None


def refused(run: Run, sharding: Sharding) -> list[str]:
    """Why a run's models cannot be computed by forward groups of these sizes."""
    models = [*trained_models(run), *frozen_models(run)]
    return [problem for role, shape in models for problem in refusals(role, shape, sharding)]


def longest_cached(run: Run) -> int | None:
    """The most tokens of a sequence that an engine's key-value cache holds; ``None`` without a cache of fixed size."""
    if run.engine is None or run.engine.local:
        return None
    room = engine_memory(run).cache
    return _largest(lambda count: cache_sequence_bytes(run, count) <= room)


def suggestion(run: Run, rows: list[LongestRow]) -> str | None:
    """The smallest forward group that computes the run's longest sequence; ``None``: its own does, or none does."""
    own = [row for row in rows if (row.sequence, row.tensor) == (run.sharding.sequence, run.sharding.tensor)]
    if not own or own[0].tokens >= run.longest:
        return None
    enough = [row for row in rows if row.tokens >= run.longest]
    if not enough:
        longest = max(rows, key=lambda row: row.tokens)
        if not longest.tokens:
            return None  # weights and states do not fit, whatever the rows
        return (
            f"no division of {run.sharding.ranks} GPUs into forward groups computes a row of {run.longest:,.0f} "
            f"tokens; {_arguments(longest)} reaches {longest.tokens:,}"
        )
    best = enough[0]
    strategy = "SequenceParallelDDPStrategy" if run.sharding.stage is None else "RLHFDeepSpeedStrategy"
    return (
        f"a row of {run.longest:,.0f} tokens fits with {_arguments(best)} of {strategy}, up to "
        f"{best.tokens:,} tokens, if a micro-batch is one row (micro_batch_size=1, or max_tokens_per_micro_batch up to "
        f"{best.tokens * run.sequences_together // best.sequence:,})"
    )


def with_row(run: Run, tokens: int) -> Run:
    """The run with micro-batches of a single row of so many tokens."""
    if run.attention == "eager":  # its scores depend on the longest sequence
        run = replace(run, prompt_tokens=float(tokens), answer_tokens=0.0, max_answer_tokens=1)
    return replace(run, micro_batch_tokens=float(tokens * run.sequences_together))


def _fits(run: Run) -> bool:
    room = run.gpu.memory * (1 - FRAGMENTATION)
    return max(phase_bytes(memory_parts(run), TRAINING).values()) <= room


def _largest(holds: Callable[[int], bool]) -> int:
    """The largest number up to :data:`MOST_TOKENS` for which a condition holds that larger ones break; 0: none."""
    low, high = 0, MOST_TOKENS + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _arguments(row: LongestRow) -> str:
    words = [f"sequence_parallel_size={row.sequence}"] if row.sequence > 1 else []
    kind = row.sequence_parallel
    words += [f"sequence_parallel={kind!r}"] if row.sequence > 1 and kind != "ulysses" else []
    words += [f"tensor_parallel_size={row.tensor}"] if row.tensor > 1 else []
    return ", ".join(words) or "no forward groups"
