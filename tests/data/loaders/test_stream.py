"""Steps of a stream: resumable anywhere. On ranks and from data: tests/datamodules/test_streaming.py."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rlhfkit.data import StepLoader, TokenBatch
from rlhfkit.data.batch import TokenExample, collate_tokens


def example(number: int) -> TokenExample:
    generator = random.Random(number)
    length = generator.randint(2, 9)
    return TokenExample([number] * length, [False] + [generator.random() < 0.6 for _ in range(length - 2)] + [True])


class Numbers:
    """Examples that carry their number as token; places skip two numbers of three, as a filter would."""

    fingerprint = ""

    def open(self, place: Any = None) -> Iterator[tuple[int, TokenExample]]:
        return ((number + 1, example(number)) for number in itertools.count(place or 0) if number % 3 == 0)


def loader(**options: Any) -> StepLoader[TokenBatch]:
    sizes: dict[str, Any] = {"steps_per_epoch": 3, "micro_batch_size": 2, "accumulate": 2} | options
    return StepLoader(Numbers(), collate_tokens, **sizes)


def numbers(batches: Any) -> list[list[int]]:
    return [sorted(set(batch.input_ids.flatten().tolist()) - {0}) for batch in batches]


def test_micro_batches_of_a_step_have_about_equal_tokens_on_all_ranks_which_know_how_many_there_are() -> None:
    shares = [list(loader(rank=rank, world_size=2)) for rank in range(2)]
    for step in range(3):
        batches = [batch for share in shares for batch in share[2 * step : 2 * step + 2]]
        assert {batch.step_micro_batches for batch in batches} == {4}
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


def test_a_step_that_was_begun_and_an_epoch_of_another_length_go_on_with_the_same_sizes_only() -> None:
    stopped, other = loader(), loader(accumulate=1)
    running = iter(stopped)
    next(running)
    with pytest.raises(ValueError, match="accumulate was 2 and is 1"):
        other.load_state_dict(stopped.state_dict())
    with pytest.raises(ValueError, match="world_size was 1 and is 2, ranks_per_forward was 1 and is 2"):
        loader(world_size=2, ranks_per_forward=2).load_state_dict(stopped.state_dict())
    next(running)
    for sizes in ({"accumulate": 1}, {"steps_per_epoch": 4}):
        with pytest.raises(ValueError, match="cannot continue inside an epoch whose steps have changed"):
            loader(**sizes).load_state_dict(stopped.state_dict())
    list(running)
    other.load_state_dict(stopped.state_dict())
    assert numbers(other)[0][0] == 36


@pytest.mark.parametrize(("limit", "taken"), [(3, 3), (0.5, 3), (4, 4), (1.0, 6)])
@pytest.mark.parametrize("epochs", [1, 2])
def test_an_epoch_that_the_trainer_ends_early_is_resumed_as_ended(limit: float, taken: int, epochs: int) -> None:
    straight = loader(limit_batches=limit)
    whole = [numbers(itertools.islice(straight, taken)) for _ in range(4)]
    stopped = loader(limit_batches=limit)
    for _ in range(epochs):
        list(itertools.islice(stopped, taken))
    resumed = loader(limit_batches=limit)
    resumed.load_state_dict(stopped.state_dict())
    assert [numbers(itertools.islice(resumed, taken)) for _ in range(4 - epochs)] == whole[epochs:]
