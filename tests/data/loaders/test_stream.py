"""Steps of a stream: the same on any number of ranks, exact totals, resumable anywhere."""

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

    def __init__(self, fingerprint: str = "") -> None:
        self.fingerprint = fingerprint

    def open(self, place: Any = None) -> Iterator[tuple[int, TokenExample]]:
        return ((number + 1, example(number)) for number in itertools.count(place or 0) if number % 3 == 0)


def loader(**options: Any) -> StepLoader[TokenBatch]:
    sizes: dict[str, Any] = {"steps_per_epoch": 3, "micro_batch_size": 2, "accumulate": 2} | options
    return StepLoader(Numbers(), collate_tokens, **sizes)


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


def test_between_two_steps_a_run_may_go_on_with_other_ranks_and_micro_batches() -> None:
    stopped = loader()
    list(itertools.islice(stopped, 2))
    rest = list(range(12, 36, 3))  # the first step had 0, 3, 6 and 9
    for sizes in ({"world_size": 2, "micro_batch_size": 1}, {"world_size": 2, "ranks_per_forward": 2}):
        shares = []
        for rank in range(2):
            resumed = loader(rank=rank, **sizes)
            resumed.load_state_dict(stopped.state_dict())
            shares += [batch for batch in resumed if batch.loss_mask.any()]
        assert sorted(number for one in numbers(shares) for number in one) == rest


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


def test_another_stream_begins_anew_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    stopped = StepLoader(Numbers("one"), collate_tokens, steps_per_epoch=3, micro_batch_size=2)
    list(itertools.islice(stopped, 1))
    for fingerprint, first in (("one", [6, 9]), ("two", [3])):  # 0 is padding too
        other = StepLoader(Numbers(fingerprint), collate_tokens, steps_per_epoch=3, micro_batch_size=2)
        other.load_state_dict(stopped.state_dict())
        found = numbers(other)
        assert len(found) == 2  # steps of the epoch that are left
        assert found[0] == first
        assert ("a new pass begins" in caplog.text) == (fingerprint == "two")
