"""Steps of a stream: the same on any number of ranks, exact totals, resumable anywhere."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rlhfkit.data import StreamLoader, TokenBatch, TokenExample, collate_tokens


def example(number: int) -> TokenExample:
    generator = random.Random(number)
    length = generator.randint(2, 9)
    return TokenExample([number] * length, [False] + [generator.random() < 0.6 for _ in range(length - 2)] + [True])


def open_stream(place: Any) -> Iterator[tuple[int, TokenExample]]:
    """Examples that carry their number as token; places skip two numbers of three, as a filter would."""
    for number in itertools.count(0 if place is None else place):
        if number % 3 == 0:
            yield number + 1, example(number)


def loader(**options: int) -> StreamLoader[TokenBatch]:
    sizes = {"steps_per_epoch": 3, "micro_batch_size": 2, "accumulate": 2} | options
    return StreamLoader(open_stream, collate_tokens, **sizes)


def numbers(batches: Any) -> list[list[int]]:
    return [sorted(set(batch.input_ids.flatten().tolist()) - {0}) for batch in batches]


def test_epochs_go_on_where_the_last_one_ended_and_nothing_is_lost() -> None:
    one = loader()
    assert len(one) == 6
    seen = [number for _ in range(4) for batch in one for number in batch.input_ids[:, 0].tolist()]
    assert len(seen) == 4 * 3 * 4
    assert sorted(seen) == [3 * i for i in range(48)]
    assert sorted(seen[:4]) == [0, 3, 6, 9]  # a step is the next window


@pytest.mark.parametrize(
    ("accumulate", "world", "together"), [(4, 1, 1), (2, 2, 1), (1, 4, 1), (4, 2, 2), (2, 4, 2), (2, 8, 4)]
)
def test_a_step_is_the_same_on_any_number_of_ranks(accumulate: int, world: int, together: int) -> None:
    options = {"micro_batch_size": 2, "accumulate": accumulate, "world_size": world, "ranks_per_forward": together}
    shares = [list(loader(rank=rank, **options)) for rank in range(world)]
    for step in range(3):
        batches = [batch for share in shares for batch in share[step * accumulate : (step + 1) * accumulate]]
        fillers = [batch for batch in batches if not batch.loss_mask.any()]  # each example has a target
        assert all(batch.input_ids.shape == (1, 2) for batch in fillers)
        assert together > 1 or not fillers
        whole = collate_tokens([example(3 * (8 * step + i)) for i in range(8)])
        seen = sorted(n for batch in batches if batch.loss_mask.any() for n in batch.input_ids[:, 0].tolist())
        assert seen == whole.input_ids[:, 0].tolist()
        for batch in batches:
            assert batch.step_tokens == int(whole.loss_mask.sum())
            assert batch.step_sequences == 8
            assert batch.step_micro_batches == accumulate * world
        if together == 1:
            tokens = [int(batch.attention_mask.sum()) for batch in batches]
            assert max(tokens) - min(tokens) <= 9


@pytest.mark.parametrize("stop", range(1, 13))
def test_resumed_loader_goes_on_where_it_stopped(stop: int) -> None:
    """Inside a step, between steps, at the end of an epoch."""
    straight = loader()
    epochs = [batch for _ in range(3) for batch in straight]
    stopped = loader()
    before = list(itertools.islice(itertools.chain(stopped, stopped), stop))
    resumed = loader()
    resumed.load_state_dict(stopped.state_dict())
    after = [batch for _ in range(3) for batch in resumed][: len(epochs) - stop]
    assert len(after) == len(epochs) - stop
    for one, other in zip([*before, *after], epochs, strict=True):
        assert torch.equal(one.input_ids, other.input_ids)
        assert one.step_tokens == other.step_tokens


def test_other_sizes_can_go_on_at_the_end_of_an_epoch_only() -> None:
    stopped, other = loader(), loader(accumulate=1)
    running = iter(stopped)
    next(running)
    with pytest.raises(ValueError, match="accumulate was 2 and is 1"):
        other.load_state_dict(stopped.state_dict())
    with pytest.raises(ValueError, match="world_size was 1 and is 2, ranks_per_forward was 1 and is 2"):
        loader(world_size=2, ranks_per_forward=2).load_state_dict(stopped.state_dict())
    list(running)
    other.load_state_dict(stopped.state_dict())
    assert numbers(other)[0][0] == 36


def test_sizes_out_of_range_are_rejected() -> None:
    with pytest.raises(ValueError, match="steps_per_epoch must be an integer of at least 1, got 0"):
        loader(steps_per_epoch=0)
    with pytest.raises(ValueError, match="rank must be an integer of at least 0 and at most 0, got 1"):
        loader(rank=1)
