"""``docs/scale.md`` from ``measured.json``: nothing is measured here."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.scale.calibration import errors, workload_of
from benchmarks.scale.cells import (
    CLUSTERS,
    GPU_NAME,
    GROUP_SIZE,
    LENGTHS,
    MODELS,
    PROMPT_TOKENS,
    PROMPTS,
    SERIAL_LIMIT,
    Cell,
    cell,
)
from benchmarks.scale.simulator import BYTES
from rlhfkit.costs.hardware import GIB

MEASURED = Path(__file__).with_name("measured.json")
PAGE = Path(__file__).parents[2] / "docs" / "scale.md"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float) -> str:
    """Two significant digits, or whole numbers with commas; a dash for infinity."""
    if math.isinf(value):
        return "-"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.2g}" if value else "0"


# ------------------------------------------------------------------ the sections


def _bytes_per_token(run: Mapping[str, Any], field: str) -> float:
    return float(run[field]) / workload_of(run).own_tokens


def _seconds(run: Mapping[str, Any]) -> float:
    """Processor seconds of the mean rank, without the fake engine's."""
    return sum(part["mean"] for name, part in run["parts"].items() if name != "engine")


def before_and_after(measured: Mapping[str, Any]) -> str:
    """One iteration of the same size on the old path and on this one, by number of ranks."""
    rows = []
    after = {
        run["ranks"]: run for run in [*measured["runs"], *measured["checks"]] if run["size"] == measured["compared"]
    }
    for old in measured["before"]["runs"]:
        new = after.get(old["ranks"])
        if new is None:
            continue
        rows.append(
            [
                str(old["ranks"]),
                f"{_seconds(old):.2f} → {_seconds(new):.2f}",
                f"{_bytes_per_token(old, 'peak'):,.0f} → {_bytes_per_token(new, 'peak'):,.0f}",
                f"{_bytes_per_token(old, 'resident'):,.0f} → {_bytes_per_token(new, 'resident'):,.0f}",
            ]
        )
    return table(["ranks", "seconds", "peak bytes per own token", "resident bytes per own token"], rows)


def checked(measured: Mapping[str, Any]) -> str:
    """Predicted over measured, for runs that the constants were not fitted to."""
    rows = []
    for run, ratio in zip(
        measured["checks"], errors(measured["constants"], measured["checks"], apart=("engine",)), strict=True
    ):
        work = workload_of(run)
        rows.append(
            [
                str(run["ranks"]),
                f"{work.sequences:,} x {work.tokens:,.0f}",
                *(f"{ratio[name]:.2f}" if name in ratio else "-" for name in ("seconds", *BYTES)),
            ]
        )
    return table(
        ["ranks", "sequences x tokens", "processor seconds", "resident bytes", "peak bytes", "bytes sent"], rows
    )


def parts_of_a_rank(measured: Mapping[str, Any]) -> str:
    """The constants, by part and driver."""
    rows = []
    for part, constants in measured["constants"].items():
        if part in BYTES:
            terms = [f"{number(value)} B x {driver}" for driver, value in constants.items() if value]
        else:
            terms = [f"{number(1e9 * value)} ns x {driver}" for driver, value in constants.items() if value]
        rows.append([part, " + ".join(terms)])
    return table(["part", "of one rank"], rows)


def line(found: Cell) -> list[str]:
    """A cell as a line of the table."""
    phases = found.phases
    train = sum(phases.get(name, 0.0) for name in TRAIN)
    sharding, engine = found.run.sharding, found.run.engine
    assert engine is not None
    return [
        f"{found.gpus:,}",
        found.model,
        f"{found.tokens // 1024}k",
        f"{sharding.sequence}" + (f" x {sharding.tensor}" if sharding.tensor > 1 else ""),
        f"{engine.tensor_parallel * engine.pipeline_parallel}",
        *(number(value) for value in (phases["generate"], phases["prepare"], train, phases["weight_sync"], found.save)),
        number(found.rank.total),
        number(found.rank.resident / GIB),
        number(found.rank.peak / GIB),
        number(found.rank.sent / GIB),
        "-" if math.isinf(found.collecting) else f"{100 * found.serial_share:.2g} %",
        found.wall,
    ]


TRAIN = ("train", "sequence_parallel", "tensor_parallel", "communication", "optimizer")
HEAD = [
    *("GPUs", "model", "tokens", "group", "engine", "generate, s", "prepare, s", "train, s", "sync, s", "save, s"),
    *("rank's own work, s", "resident, GiB", "peak, GiB", "sent, GiB", "serial", "first wall"),
]


def serial_at(measured: Mapping[str, Any], ranks: int = 64) -> str:
    """Serial work at a number of training ranks, where all of the cell fits."""
    rows = []
    for model in MODELS:
        for tokens in LENGTHS:
            found = cell(2 * ranks, model, tokens, measured)
            if math.isinf(found.collecting):
                continue
            parts = ", ".join(f"{name} {number(seconds)}" for name, seconds in found.serial.items())
            rows.append(
                [model, f"{tokens // 1024}k", number(found.collecting), parts, f"{100 * found.serial_share:.2g} %"]
            )
    return table(["model", "tokens", "collecting, s", "serial work, s", "share"], rows)


def large_run(measured: Mapping[str, Any]) -> str:
    """The sentence about the run of 16,384 samples."""
    run = measured["large"]
    work = workload_of(run)
    return (
        f"{work.sequences:,} samples of {work.tokens:,.0f} tokens ({work.own_tokens * work.ranks / 1e6:,.0f} million "
        f"tokens) over {run['ranks']} ranks: the peak of a rank is {run['peak'] / 2**20:,.0f} MiB above an idle one's, "
        f"{_bytes_per_token(run, 'peak'):.1f} B per token of its own rows; {run['resident'] / 2**20:,.0f} MiB "
        f"({_bytes_per_token(run, 'resident'):.1f} B per token) stay while it trains.\n"
    )


def page(measured: Mapping[str, Any]) -> str:
    """The whole page."""
    cells = [cell(gpus, model, tokens, measured) for gpus in CLUSTERS for model in MODELS for tokens in LENGTHS]
    return TEXT.format(
        commit=measured["commit"],
        before_commit=measured["before"]["commit"],
        before=before_and_after(measured),
        checked=checked(measured),
        constants=parts_of_a_rank(measured),
        large=large_run(measured),
        cells=table(HEAD, [line(found) for found in cells]),
        serial=serial_at(measured),
        limit=f"{100 * SERIAL_LIMIT:g} %",
        gpu=GPU_NAME,
        prompts=f"{PROMPTS:,}",
        group=GROUP_SIZE,
        prompt_tokens=PROMPT_TOKENS,
    )


TEXT = """# An iteration at cluster scale

Written by `python -m benchmarks.scale page` from `benchmarks/scale/measured.json`; do not edit. What an iteration of
GRPO costs by the size of the cluster, the model and the answers, and what breaks first. Work of the ranks on CPUs was
measured by running the real `RolloutCallback`, `GRPOModule` and `PromptDataModule` with an engine that answers at
once (`benchmarks/scale/rank.py`); seconds and bytes on GPUs are closed formulas (`rlhfkit/costs/`), not measurements.

## Before and after

One iteration of 768 sequences of 1,152 tokens on gloo ranks, one update, commit {before_commit} → {commit}.
An own token is one of the rank's share, 1 / ranks of the iteration. Seconds are processor seconds of the mean
rank. *Resident* is what a rank holds while it trains; *peak* is the highest resident set of the iteration,
with what glibc's allocator keeps. Both are above an idle process: before its first iteration in the first
column of each pair (the old path kept the former iteration, too), after its last in the second.

{before}

## Checked against real ranks

Predicted over measured, for runs that are not among those that the constants were fitted to. The machine has two
cores, so up to six ranks share them: processor seconds of the mean rank are compared, not seconds of the clock. The
fake engine is left out. Peaks depend on how glibc's allocator reuses memory: equal runs on one rank gave 65, 78 and
100 B per own token.

{checked}

The constants (`python -m benchmarks.scale measure` fits them anew):

{constants}

## 16,384 samples

{large}
`python -m benchmarks.scale large` repeats it and fails if a rank holds more than 40 B per token of its own rows and
200 B per sequence of the iteration, or its peak exceeds 100 B per own token.

Rows are padded to the longest of a rank while they are shared and prepared, which is in the peak: a token of padding
counts there as well, and the table below counts padding to the limit of the lengths. While the rank trains it keeps
its rows without padding, and only the micro-batch in use is padded.

## Clusters

{prompts} prompts of {prompt_tokens} tokens x {group} answers, one update an iteration. *Tokens* is the mean
of an answer; lengths are lognormal (σ = 0.6) up to twice the mean. Half of the GPUs ({gpu}) train with ZeRO 3
and gradient checkpointing, half generate. *Group* is the number of ranks that divide the tokens of a forward pass
([sequence parallelism](strategy.md#which-kind-of-parallelism-when)), the smallest with which the longest row fits;
*engine* the number of GPUs of an engine, the smallest that holds the model and a sequence: 1, 2, 4 or 8 tensor-parallel
ones, then 2 and 4 pipeline stages of 8;
`max_staleness=1`, so an iteration takes the longer of *generate* and the rest. *Save* is a checkpoint,
written in the background. *Rank's own work*, *resident*, *peak* and *sent* are of one training rank on its
CPU and for one iteration; *serial* is the share of work that more ranks do not make shorter, in the phase in
which samples are collected. 7B is Qwen2.5's shape, 70B and 405B are Llama 3.1's, 1T MoE is Kimi K2's.

{cells}

## Serial work at 64 ranks

The bound is {limit} of the phase. Every rank plans the micro-batches of all and reads the log of all; rank 0
also serves the store.

{serial}

## What the model leaves out

Engines on other machines (their payloads reach a rank over Ray), the cost of a reward beyond reading the text,
latency of collectives between machines, stragglers, failures. Latencies of gloo are those of one machine.
"""


def load() -> dict[str, Any]:
    """What was measured."""
    found: dict[str, Any] = json.loads(MEASURED.read_text())
    return found
