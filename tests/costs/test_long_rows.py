"""The longest row that fits, and the groups that it needs."""

import dataclasses
import io
import json
from typing import Any

import pytest
from rich.console import Console

from rlhfkit.costs import EngineShape, Run, Sharding, estimate_run, longest_row, longest_rows
from rlhfkit.costs.long_rows import MOST_TOKENS, longest_cached, suggestion, with_row
from rlhfkit.costs.memory.engines import cache_sequence_bytes, engine_memory
from rlhfkit.costs.memory.parts import FRAGMENTATION, TRAINING, phase_bytes
from rlhfkit.costs.memory.whole_run import memory_parts

from .shapes import grpo_70b


def run_70b(**changes: Any) -> Run:
    """Rows of 65,536 tokens on 64 GPUs."""
    fields: dict[str, Any] = {
        "engine": None,
        "sharding": Sharding(ranks=64, stage=3),
        "prompt_tokens": 65536.0,
        "answer_tokens": 0.0,
        "micro_batch_tokens": 65536.0,
    }
    return grpo_70b(**(fields | changes))


def full(run: Run, tokens: int) -> float:
    """Bytes over those that a GPU has, with one row of so many tokens."""
    parts = memory_parts(with_row(run, tokens))
    return max(phase_bytes(parts, TRAINING).values()) / (run.gpu.memory * (1 - FRAGMENTATION))


@pytest.mark.parametrize("sizes", [{}, {"sequence": 8}, {"tensor": 4}, {"sequence": 64, "sequence_parallel": "ring"}])
def test_one_token_more_does_not_fit(sizes: dict[str, Any]) -> None:
    run = run_70b(sharding=Sharding(ranks=64, stage=3, **sizes))
    found = longest_row(run)
    assert full(run, found.tokens) <= 1 < full(run, found.tokens + 1)
    assert "GiB" in found.limit


def test_the_longest_row_grows_with_the_sequence_ranks() -> None:
    one, two, four = (
        longest_row(run_70b(sharding=Sharding(ranks=64, stage=3, sequence=size))).tokens for size in (1, 2, 4)
    )
    assert 25_000 < one < 40_000  # about 30k tokens without sequence parallelism
    assert two > 1.9 * one
    assert four > 3.8 * one


def test_states_that_do_not_fit_leave_no_room_for_a_row() -> None:
    run = run_70b(sharding=Sharding(ranks=8, stage=3))
    assert longest_row(run).tokens == 0
    assert "optimizer" in longest_row(run).limit
    assert suggestion(run, longest_rows(run)) is None


def test_all_divisions_are_looked_at_and_refused_ones_left_out() -> None:
    found = {(row.sequence, row.tensor): row for row in longest_rows(run_70b())}
    assert {(1, 1), (64, 1), (8, 8), (1, 8)} <= found.keys()
    assert (1, 16) not in found  # 16 GPUs are two machines
    assert all(64 % (sequence * tensor) == 0 for sequence, tensor in found)
    layer = dataclasses.replace(run_70b().policy.layer, heads=28, key_heads=4)
    few = run_70b(policy=dataclasses.replace(run_70b().policy, layer=layer))
    kinds = {row.sequence: row.sequence_parallel for row in longest_rows(few) if row.tensor == 1}
    assert (kinds[4], kinds[8]) == ("ulysses", "hybrid")  # 8 does not divide 28 heads
    mixture = run_70b(policy=dataclasses.replace(run_70b().policy, experts=8))
    assert {row.tensor for row in longest_rows(mixture)} == {1}


def test_without_deepspeed_only_tokens_are_divided() -> None:
    rows = longest_rows(run_70b(sharding=Sharding(ranks=64)))
    assert {row.tensor for row in rows} == {1}
    assert {row.sequence for row in rows} == {1, 2, 4, 8, 16, 32, 64}


def test_the_smallest_group_that_is_enough_is_suggested() -> None:
    run = run_70b()
    found = estimate_run(run)
    (problem,) = found.problems
    assert "Divide rows over more ranks (sequence_parallel_size), or set tiled_mlp=True and offload_" in problem
    assert found.suggestion is not None
    assert found.suggestion.startswith("a row of 65,536 tokens fits with sequence_parallel_size=4 of RLHFDeepSpeed")
    better = run_70b(sharding=Sharding(ranks=64, stage=3, sequence=4))
    assert estimate_run(better).problems == []
    assert estimate_run(better).suggestion is None


def test_rows_that_no_group_computes_are_said() -> None:
    run = run_70b(prompt_tokens=5e6, micro_batch_tokens=5e6)
    said = suggestion(run, longest_rows(run))
    assert said is not None
    assert "no division of 64 GPUs into forward groups computes a row of 5,000,000 tokens" in said


def test_a_preference_pair_is_two_rows() -> None:
    single, pair = (longest_row(run_70b(sequences_together=count)).tokens for count in (1, 2))
    assert pair == single // 2


def test_an_engine_has_a_limit_of_its_own() -> None:
    run = grpo_70b(engine=EngineShape(tensor_parallel=4))
    found = longest_cached(run)
    assert found is not None
    assert cache_sequence_bytes(run, found) <= engine_memory(run).cache < cache_sequence_bytes(run, found + 1)
    assert longest_cached(run_70b()) is None
    windowed = dataclasses.replace(run.policy, window=100, windowed_layers=80)
    assert longest_cached(dataclasses.replace(run, policy=windowed)) == MOST_TOKENS


def test_a_report_has_the_longest_rows() -> None:
    found = estimate_run(run_70b())
    console = Console(width=200, file=io.StringIO())
    console.print(found.table())
    text = console.file.getvalue()
    for wanted in ("Longest row that fits, tokens", "8 tensor ranks", "For longer rows: a row of 65,536", "most of it"):
        assert wanted in text
    read = json.loads(json.dumps(found.to_dict()))
    assert read["longest_row"]["tokens"] == found.longest_row.tokens
    assert {"sequence": 8, "tensor": 1} in [
        {name: row[name] for name in ("sequence", "tensor")} for row in read["longest_rows"]
    ]
    assert read["suggestion"] == found.suggestion
