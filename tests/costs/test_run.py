"""The plain description of a run."""

import pytest

from rlhfkit.costs import EngineShape, Precision, Sharding

from .shapes import grpo_70b


@pytest.mark.parametrize(
    ("precision", "deepspeed", "expected"),
    [
        ("32-true", False, (4, 4, 4)),
        ("bf16-true", False, (2, 2, 2)),
        ("bf16-mixed", False, (4, 2, 4)),
        (32, True, (4, 4, 4)),
        ("bf16-true", True, (2, 2, 4)),
        ("bf16-mixed", True, (2, 2, 4)),
        ("16-true", True, (2, 2, 4)),
    ],
)
def test_bytes_of_numbers_by_precision(precision: str, deepspeed: bool, expected: tuple[int, int, int]) -> None:
    found = Precision.of(precision, deepspeed=deepspeed)
    assert (found.weights, found.compute, found.main_weights) == expected


def test_a_shared_prompt_counts_once_a_group_in_packed_rows() -> None:
    assert grpo_70b().tokens == 16384 * (4096 + 512 / 16)
    assert grpo_70b(attention="sdpa").tokens == 16384 * (4096 + 512)


def test_micro_batches_cover_the_iteration() -> None:
    run = grpo_70b()
    covered = run.micro_batches * run.micro_batch_tokens * run.sharding.ranks
    assert covered == pytest.approx(run.tokens, rel=0.05)
    assert grpo_70b(passes=2).micro_batches == pytest.approx(2 * run.micro_batches, abs=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: grpo_70b(sequences=0), "Run.sequences must be an integer of at least 1, got 0"),
        (lambda: grpo_70b(trained_share=2.0), "Run.trained_share must be"),
        (lambda: Sharding(stage=4), "Sharding.stage must be an integer of at least 0 and at most 3 or None, got 4"),
        (lambda: EngineShape(memory_share=0.0), "EngineShape.memory_share must be"),
    ],
)
def test_numbers_are_checked(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
