"""Properties of the loader that makes its own batches."""

import pytest

from rlhfkit.data import Experience, Prompt, Sample
from rlhfkit.data.loaders.experience import ExperienceLoader


class Collector:
    """Makes batches whose rewards tell which iteration and position they are of."""

    group_size = 2

    def __init__(self, count: int) -> None:
        self.count = count
        self.calls = 0

    def batches_per_iteration(self) -> int:
        return self.count

    def collect(self) -> list[Experience]:
        self.calls += 1
        samples = [
            Sample(Prompt(1, [1]), 0, [2], [-0.1], [0], "stop", reward=float(10 * self.calls + position))
            for position in range(self.count)
        ]
        return [Experience.from_samples([sample]) for sample in samples]


def rewards(batches: list[Experience]) -> list[float]:
    return [float(batch.rewards) for batch in batches]


def test_an_iteration_is_collected_once_and_not_before_it_is_asked_for() -> None:
    source = Collector(3)
    loader = ExperienceLoader(source.collect, 3)
    assert len(loader) == 3
    iterator = iter(loader)
    assert source.calls == 0
    next(iterator)
    assert source.calls == 1
    assert rewards(list(loader)) == [20, 21, 22]  # a new one, even if the last was not finished
    loader.prefetch()
    loader.prefetch()
    assert source.calls == 3
    assert rewards(list(loader)) == [30, 31, 32]
    assert rewards(list(loader)) == [40, 41, 42]


@pytest.mark.parametrize("returned", [0, 2, 4])
def test_wrong_count_is_an_error(returned: int) -> None:
    with pytest.raises(ValueError, match=f"returned {returned} batches, but the loader promised 3"):
        next(iter(ExperienceLoader(Collector(returned).collect, 3)))


def test_a_loader_that_may_be_resized_says_each_length_before_the_first_batch() -> None:
    source, said = Collector(6), []
    loader = ExperienceLoader(source.collect, 2, resized=said.append)
    assert len(loader) == 2
    batches = iter(loader)
    first = rewards([next(batches)])
    assert (said, len(loader)) == ([6], 6)
    state = loader.state_dict()
    source.count = 4
    assert len(list(loader)) == 4
    assert said == [6, 4]
    resumed = ExperienceLoader(source.collect, 2, resized=said.append)
    resumed.load_state_dict(state)
    assert (said, len(resumed)) == ([6, 4, 6], 6)
    resumed.prefetch()  # what is there already is not collected again
    assert first + rewards(list(resumed)) == [10, 11, 12, 13, 14, 15]
    assert rewards(list(resumed)) == [30, 31, 32, 33]
    resumed.load_state_dict(resumed.state_dict())  # of its end: nothing is there already
    assert rewards(list(resumed)) == [40, 41, 42, 43]
    source.count = 3
    with pytest.raises(ValueError, match="returned 3 batches, but an iteration of 2 updates"):
        resumed.prefetch()


def test_an_iteration_of_another_number_of_micro_batches_is_rejected() -> None:
    saved = ExperienceLoader(Collector(2).collect, 2)
    next(iter(saved))
    with pytest.raises(ValueError, match="iteration of 2 micro-batches per rank, this run has 3"):
        ExperienceLoader(Collector(3).collect, 3).load_state_dict(saved.state_dict())
    source = Collector(6)
    saved = ExperienceLoader(source.collect, 2, resized=print)
    list(saved)
    other = ExperienceLoader(source.collect, 3, resized=print)
    other.load_state_dict(saved.state_dict())  # of its end
    assert len(other) == 3
    next(iter(saved))
    with pytest.raises(ValueError, match="iteration of 6 micro-batches per rank, this run has 3, or a multiple"):
        other.load_state_dict(saved.state_dict())
