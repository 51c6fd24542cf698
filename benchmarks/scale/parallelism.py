"""The table of ``docs/strategy.md``: which forward groups rows of a length need, and what their exchanges cost."""

from dataclasses import replace
from pathlib import Path

from benchmarks.scale.cells import shape_of
from rlhfkit.costs import GPUS, Run, Sharding, estimate_run
from rlhfkit.costs.hardware import GIB
from rlhfkit.costs.long_rows import longest_row, refused, smallest_division
from rlhfkit.costs.memory.parts import TRAINING
from rlhfkit.costs.seconds import sequence_seconds, tensor_seconds, train_seconds
from rlhfkit.mesh import SequenceParallel

PAGE = Path(__file__).parents[2] / "docs" / "strategy.md"
BEGIN, END = "<!-- python -m benchmarks.scale parallelism -->", "<!-- end -->"
HEAD = [
    *("model", "GPUs", "tokens of a row", "strategy", "longest row without groups", "with tiles and offload"),
    *("sequence ranks", "GiB"),
    *("Ulysses", "ring", "as many tensor ranks"),
]
GPU_NAME = "H100"


def run_of(model: str, gpus: int, tokens: int, *, offload: bool) -> Run:
    """Supervised fine-tuning with ZeRO 3 and gradient checkpointing, one row a micro-batch."""
    sharding = Sharding(ranks=gpus, stage=3, offload_optimizer=offload, offload_parameters=offload)
    return Run(
        policy=shape_of(model),
        gpu=GPUS[GPU_NAME],
        sharding=sharding,
        gradient_checkpointing=True,
        sequences=gpus,
        prompt_tokens=float(tokens),
        answer_tokens=0.0,
        micro_batch_tokens=float(tokens),
    )


def line(model: str, gpus: int, tokens: int) -> list[str]:
    """One line of the table."""
    for offload in (False, True):
        run = run_of(model, gpus, tokens, offload=offload)
        found = smallest_division(run)
        if found is not None:
            break
    start = [model, str(gpus), f"{tokens:,}", "`rlhf_zero3" + ("_offload`" if offload else "`")]
    saving = replace(run, tiled_mlp=True, offload_activations=True)
    start += [f"{longest_row(each).tokens:,}" for each in (run, saving)]
    if found is None:
        return [*start, *["does not fit"] + ["-"] * 4]
    size = found.sequence
    memory = estimate_run(replace(run, sharding=found)).peak[TRAINING] / GIB
    shares = [_share(run, size, 1, "ulysses"), _share(run, size, 1, "ring"), _share(run, 1, size, "ulysses")]
    return [*start, str(size), f"{memory:.0f}", *shares]


def _share(run: Run, sequence: int, tensor: int, kind: SequenceParallel) -> str:
    """Seconds of the exchanges of a group over those of its arithmetic; a dash: refused, or nothing is exchanged."""
    if sequence * tensor == 1:
        return "-"
    sharding = replace(run.sharding, sequence=sequence, tensor=tensor, sequence_parallel=kind)
    if tensor > run.gpus_per_machine or refused(run, sharding):
        return "refused"
    grouped = replace(run, sharding=sharding)
    return f"{(sequence_seconds(grouped) + tensor_seconds(grouped)) / train_seconds(grouped):.1%}"


def table() -> str:
    """The table in Markdown."""
    rows = [
        line(model, gpus, tokens) for model in ("7B", "70B") for gpus in (8, 64) for tokens in (8192, 32768, 131072)
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in [HEAD, ["---"] * len(HEAD), *rows])


def page(text: str) -> str:
    """The page with a new table between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"
