"""Clusters, models and lengths of the table: what each needs, and what breaks first.

Seconds and bytes on GPUs come from :mod:`rlhfkit.costs` (closed formulas, not measured here); what the ranks do on CPUs
comes from :mod:`benchmarks.scale.simulator` with measured constants.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from benchmarks.scale.simulator import Prediction, StoreUse, Workload, predict, serial_seconds
from rlhfkit.costs import GPUS, EngineShape, ModelShape, Run, model_shape
from rlhfkit.costs.hardware import GIB
from rlhfkit.costs.long_rows import smallest_division
from rlhfkit.costs.memory.engines import engine_memory
from rlhfkit.costs.memory.parts import FRAGMENTATION, TRAINING, phase_bytes
from rlhfkit.costs.memory.whole_run import memory_parts
from rlhfkit.costs.run import Sharding
from rlhfkit.costs.seconds import checkpoint_seconds, phase_seconds

CLUSTERS = (8, 64, 256, 1024)
"""GPUs. Half of them train, half generate."""
LENGTHS = (2048, 16384, 65536)
"""Mean tokens of an answer; the limit is twice as many, and lengths are lognormal."""
PROMPTS, GROUP_SIZE, PROMPT_TOKENS = 1024, 16, 512
GPU_NAME = "H200"
ENGINE_SIZES = ((1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 4))
"""Tensor-parallel GPUs and pipeline stages of an engine, in the order in which they are tried."""
HOST_BYTES = 128 * GIB
"""Of a rank: half of a machine of 2 TiB with 8 GPUs."""
SERIAL_LIMIT = 0.03
"""Share of the phase that work on one process may take."""


def _configuration(name: str) -> Any:
    from transformers import DeepseekV3Config, LlamaConfig, Qwen2Config

    llama: dict[str, Any] = {"num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False}
    if name == "7B":  # Qwen2.5-7B
        return Qwen2Config(
            hidden_size=3584,
            intermediate_size=18944,
            num_hidden_layers=28,
            num_attention_heads=28,
            num_key_value_heads=4,
            vocab_size=152064,
            tie_word_embeddings=False,
        )
    if name == "70B":  # Llama 3.1
        return LlamaConfig(
            hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, **llama
        )
    if name == "405B":  # Llama 3.1
        return LlamaConfig(
            hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128, **llama
        )
    return DeepseekV3Config(  # Kimi K2
        hidden_size=7168,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        num_hidden_layers=61,
        num_attention_heads=64,
        num_key_value_heads=64,
        n_routed_experts=384,
        n_shared_experts=1,
        num_experts_per_tok=8,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        vocab_size=163840,
        tie_word_embeddings=False,
    )


MODELS = ("7B", "70B", "405B", "1T MoE")


@cache
def shape_of(name: str) -> ModelShape:
    """Parameters and widths of one of :data:`MODELS`."""
    return model_shape(_configuration(name))


def run_of(gpus: int, model: str, tokens: int) -> Run:
    """The run of a cell: ZeRO 3 with gradient checkpointing, engines and forward groups of the fewest GPUs that do.

    Engines have tensor-parallel GPUs in a machine, and pipeline stages over several.
    """
    ranks = gpus // 2
    for tensor, stages in ENGINE_SIZES:
        if tensor * stages > ranks:
            break
        run = Run(
            policy=shape_of(model),
            gpu=GPUS[GPU_NAME],
            sharding=Sharding(ranks=ranks, stage=3),
            engine=EngineShape(count=ranks // (tensor * stages), tensor_parallel=tensor, pipeline_parallel=stages),
            gradient_checkpointing=True,
            sequences=PROMPTS * GROUP_SIZE,
            group_size=GROUP_SIZE,
            prompt_tokens=PROMPT_TOKENS,
            answer_tokens=tokens,
            max_answer_tokens=2 * tokens,
            max_staleness=1,
        )
        if engine_memory(run).longest >= 1:
            break
    sharding = smallest_division(run) or run.sharding
    together = max(16384.0 * sharding.sequence, run.longest)
    return replace(run, sharding=sharding, micro_batch_tokens=together)


def work_of(run: Run) -> Workload:
    """What the ranks of a run do on CPUs."""
    return Workload(
        sequences=run.sequences,
        group_size=run.group_size,
        prompt_tokens=run.prompt_tokens,
        answer_tokens=run.answer_tokens,
        longest=run.longest,
        ranks=run.sharding.ranks,
        micro_batch_size=max(1.0, run.micro_batch_tokens / run.sequence_tokens) / run.sharding.group,
    )


@dataclass(frozen=True)
class Cell:
    """One line of the table."""

    gpus: int
    model: str
    tokens: int
    run: Run
    phases: dict[str, float]
    """Seconds on GPUs."""
    save: float
    """Seconds of writing a checkpoint, in the background."""
    rank: Prediction
    serial: dict[str, float]
    """Seconds of work that more ranks do not make shorter, on the process that has most of it, by part."""
    wall: str
    """What breaks, or limits, first."""

    @property
    def collecting(self) -> float:
        """Seconds of the phase in which samples are collected: generation, and the ranks' own work on them."""
        return self.phases["generate"] + self.rank.total

    @property
    def serial_share(self) -> float:
        """Serial work over the phase it is in."""
        return sum(self.serial.values()) / self.collecting


def serial_parts(work: Workload, measured: Mapping[str, Any]) -> dict[str, float]:
    """Serial work of an iteration by part: what every rank does for all sequences, and what rank 0's store does."""
    served = StoreUse(**measured["store"]).iteration_seconds(work, **measured["log"])
    return serial_seconds(measured["constants"], work) | {"store": served}


def cell(gpus: int, model: str, tokens: int, measured: Mapping[str, Any]) -> Cell:
    """Predict one line; ``measured`` is ``measured.json``."""
    run = run_of(gpus, model, tokens)
    work = work_of(run)
    rank = predict(measured["constants"], work)
    phases = phase_seconds(run)
    found = Cell(
        gpus=gpus,
        model=model,
        tokens=tokens,
        run=run,
        phases=phases,
        save=checkpoint_seconds(run),
        rank=rank,
        serial=serial_parts(work, measured),
        wall="",
    )
    return Cell(**{**vars(found), "wall": first_wall(found)})


def first_wall(found: Cell) -> str:
    """What does not fit, in the order in which a run would meet it; otherwise what takes the longest."""
    run = found.run
    engine = run.engine
    assert engine is not None
    room = engine_memory(run)
    if room.longest < 1:
        part = "weights" if room.cache <= 0 else "one sequence's keys and values"
        gpus = engine.tensor_parallel * engine.pipeline_parallel
        return f"engine: {part} on {gpus} GPUs ({room.weights / GIB:.0f} GiB of weights each)"
    parts = [part for part in memory_parts(run) if part.place == TRAINING]
    for phase, total in phase_bytes(parts, TRAINING).items():
        if total > run.gpu.memory * (1 - FRAGMENTATION):
            largest = max((part for part in parts if phase in part.phases), key=lambda part: part.bytes)
            return f"training GPU, {phase}: {total / GIB:.0f} GiB, of it {largest.part} {largest.bytes / GIB:.0f} GiB"
    if found.rank.peak > HOST_BYTES:
        return f"host memory of a rank: {found.rank.peak / GIB:.0f} GiB of samples"
    if found.serial_share > SERIAL_LIMIT:
        part = max(found.serial, key=lambda name: found.serial[name])
        return f"serial work: {part}, {found.serial[part]:.1f} s"
    learning = sum(seconds for name, seconds in found.phases.items() if name != "generate")
    if found.collecting >= learning:
        return f"none; generation takes longest ({found.phases['generate']:,.0f} s)"
    longest = max((name for name in found.phases if name != "generate"), key=lambda name: found.phases[name])
    return f"none; {longest.replace('_', ' ')} takes longest ({found.phases[longest]:,.0f} s)"
