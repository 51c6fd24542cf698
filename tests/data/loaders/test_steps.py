"""Properties of supervised optimizer steps: the same on any number of ranks, exactly normalised, resumable."""

import itertools
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rlhfkit.data import StepLoader, TokenBatch
from rlhfkit.data.batch import TokenExample, collate_tokens
from rlhfkit.losses import aggregate

VOCABULARY = 11


def make_examples(count: int, seed: int = 0) -> list[TokenExample]:
    generator = random.Random(seed)
    examples = []
    for _ in range(count):
        length = generator.randint(2, 12)
        mask = [generator.random() < 0.6 for _ in range(length)]
        examples.append(TokenExample([generator.randrange(1, VOCABULARY) for _ in range(length)], mask))
    return examples


class Table(list[TokenExample]):
    """Examples with their sizes."""

    @property
    def lengths(self) -> list[int]:
        return [len(example.input_ids) for example in self]

    @property
    def targets(self) -> list[int]:
        return [example.targets for example in self]


def loader(examples: list[TokenExample], **options: object) -> StepLoader[TokenBatch]:
    return StepLoader(Table(examples), collate_tokens, **options)


def windows(batches: list[list[TokenBatch]], accumulate: int) -> list[list[TokenBatch]]:
    """Batches of all ranks, by optimizer step as Lightning forms them."""
    steps = range(0, len(batches[0]), accumulate)
    return [[batch for share in batches for batch in share[start : start + accumulate]] for start in steps]


def of_each(members: list[Any], size: int) -> list[list[Any]]:
    """What the ranks have that share micro-batches."""
    return [members[first : first + size] for first in range(0, len(members), size)]


@given(
    count=st.integers(1, 40),
    micro=st.integers(1, 4),
    accumulate=st.integers(1, 4),
    data=st.integers(1, 4),
    together=st.sampled_from([1, 1, 2, 4]),
    epoch=st.integers(0, 3),
)
def test_all_ranks_yield_equally_many_batches_and_every_example_once(
    count: int, micro: int, accumulate: int, data: int, together: int, epoch: int
) -> None:
    examples, world = make_examples(count), data * together
    options = {"micro_batch_size": micro, "accumulate": accumulate, "epoch": lambda: epoch}
    shares = []
    for rank in range(world):
        one = loader(examples, rank=rank, world_size=world, ranks_per_forward=together, **options)
        shares.append(list(one))
        assert len(shares[-1]) == len(one)
    seen = [
        tuple(ids[real].tolist())
        for batch in itertools.chain(*shares)
        for ids, real in zip(batch.input_ids, batch.attention_mask, strict=True)
    ]
    wanted = [tuple(example.input_ids) for example in examples]
    for sequence in wanted:
        seen.remove(sequence)  # what is left over only fills up ranks that have nothing to do
    trained = sum(int(batch.loss_mask.sum()) for batch in itertools.chain(*shares))
    assert trained == sum(example.targets for example in examples)
    assert len(seen) < world if together == 1 else all(len(row) == 2 for row in seen)
    for step in windows(shares, accumulate):  # whose totals each of its batches knows
        tokens = sum(int(batch.loss_mask.sum()) for batch in step)
        sequences = sum(int(batch.loss_mask.any(-1).sum()) for batch in step)
        totals = {(batch.step_tokens, batch.step_sequences, batch.step_micro_batches) for batch in step}
        assert totals == {(tokens, sequences, accumulate * world)}
    # Each optimizer step and micro-batch of the ranks that share it has the examples that it has without sharing.
    alone = loader(examples, world_size=data, **options)
    shared = loader(examples, world_size=world, ranks_per_forward=together, **options)
    for one, other in zip(alone.schedule.steps(epoch), shared.schedule.steps(epoch), strict=True):
        joined = [sorted(itertools.chain(*part)) for part in of_each(other.micro_batches, together)]
        assert joined == one.micro_batches
        assert other.totals[:2] == one.totals[:2]
        assert other.totals.micro_batches == accumulate * world


class Model(nn.Module):
    """Each token's log-prob depends on the token and the one before it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, dtype=torch.float64))

    def forward(self, batch: TokenBatch) -> torch.Tensor:
        logprobs = self.table[batch.input_ids[:, :-1]].log_softmax(-1)
        return -logprobs.gather(-1, batch.input_ids[:, 1:, None])[..., 0]


def step_gradients(micro: int, accumulate: int, world: int, mode: str, together: int = 1) -> list[torch.Tensor]:
    """Gradients of all steps of an epoch, with the divisions that Lightning and data-parallel averaging do."""
    examples = make_examples(29, seed=2)
    options = {"micro_batch_size": micro, "accumulate": accumulate, "world_size": world, "ranks_per_forward": together}
    shares = [list(loader(examples, rank=rank, **options)) for rank in range(world)]
    gradients = []
    for step in windows(shares, accumulate):
        model = Model()
        for batch in step:
            denominator = batch.token_denominator if mode == "token-mean" else batch.sequence_denominator
            loss = aggregate(model(batch), batch.loss_mask, mode, denominator)
            (loss / accumulate / world).backward()
        gradients.append(model.table.grad)
    return gradients


@pytest.mark.parametrize("mode", ["token-mean", "sequence-mean-token-mean"])
@pytest.mark.parametrize(
    ("micro", "accumulate", "world", "together"),
    [
        *[(1, 8, 1, 1), (2, 4, 1, 1), (4, 1, 2, 1), (2, 2, 2, 1), (1, 2, 4, 1)],
        *[(8, 1, 2, 2), (2, 2, 4, 2), (1, 4, 4, 2), (1, 8, 4, 4)],
    ],
)
def test_gradient_of_a_step_does_not_depend_on_how_it_is_split(
    micro: int, accumulate: int, world: int, together: int, mode: str
) -> None:
    """29 examples in steps of 8: the last step has 5, whose micro-batches are fewer and some ranks' empty."""
    expected = step_gradients(8, 1, 1, mode)
    found = step_gradients(micro, accumulate, world, mode, together)
    assert len(found) == len(expected) == 4
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("mode", ["token-mean", "sequence-mean-token-mean"])
@pytest.mark.parametrize("budget", [12, 16])
def test_with_a_token_budget_a_step_does_not_depend_on_the_ranks(budget: int, mode: str) -> None:
    """4 micro-batches a step: of one rank, of two, of four, of two groups; the totals are those of the bins in it."""
    examples = make_examples(29, seed=2)
    found = []
    for accumulate, world, together in [(4, 1, 1), (2, 2, 1), (1, 4, 1), (4, 2, 2), (2, 4, 2), (1, 12, 3)]:
        options = {"max_tokens_per_micro_batch": budget, "accumulate": accumulate, "world_size": world}
        shares = [list(loader(examples, rank=rank, ranks_per_forward=together, **options)) for rank in range(world)]
        assert len({len(share) for share in shares}) == 1
        for members in of_each(shares, together):
            for parts in zip(*members, strict=True):
                fillers = [part for part in parts if part.input_ids.shape == (1, 2) and not part.loss_mask.any()]
                assert sum(int(part.attention_mask.sum()) for part in parts) <= budget + 2 * len(fillers)
                assert together > 1 or not fillers
        trained = sum(int(batch.loss_mask.sum()) for share in shares for batch in share)
        assert trained == sum(example.targets for example in examples)
        gradients = []
        for step in windows(shares, accumulate):
            model = Model()
            for batch in step:
                assert batch.step_tokens == sum(int(other.loss_mask.sum()) for other in step)
                denominator = batch.token_denominator if mode == "token-mean" else batch.sequence_denominator
                (aggregate(model(batch), batch.loss_mask, mode, denominator) / accumulate / world).backward()
            gradients.append(model.table.grad)
        found.append(gradients)
    assert len(found[0]) > 2
    for gradients in found[1:]:
        for one, other in zip(gradients, found[0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


def test_with_a_token_budget_epochs_have_one_length_and_resume_anywhere() -> None:
    examples = make_examples(50, seed=4)
    options = {"max_tokens_per_micro_batch": 20, "accumulate": 2}
    epochs = [list(loader(examples, epoch=lambda epoch=epoch: epoch, **options)) for epoch in range(3)]
    assert len({len(epoch) for epoch in epochs}) == 1
    assert len({tuple(batch.input_ids.sum().item() for batch in epoch) for epoch in epochs}) == 3
    for stop in (1, 5, len(epochs[1]) - 1):
        stopped = loader(examples, epoch=lambda: 1, **options)
        before = list(itertools.islice(iter(stopped), stop))
        resumed = loader(examples, epoch=lambda: 1, **options)
        resumed.load_state_dict(stopped.state_dict())
        both = [batch.input_ids.tolist() for batch in [*before, *resumed]]
        assert both == [batch.input_ids.tolist() for batch in epochs[1]]


def test_whole_epoch_totals_make_the_plain_mean_of_losses_exact() -> None:
    examples = make_examples(29, seed=3)
    model = Model()
    everything = collate_tokens(examples)
    exact = aggregate(model(everything), everything.loss_mask)
    sizes = [
        {"micro_batch_size": 3},
        {"micro_batch_size": 2},
        {"micro_batch_size": 7},
        {"max_tokens_per_micro_batch": 30},
    ]
    for size, world in zip(sizes, [1, 3, 4, 2], strict=True):
        losses = [
            aggregate(model(batch), batch.loss_mask, "token-mean", batch.token_denominator)
            for rank in range(world)
            for batch in loader(examples, **size, rank=rank, world_size=world, shuffle=False, normalize_over_epoch=True)
        ]
        torch.testing.assert_close(torch.stack(losses).mean(), exact, rtol=1e-12, atol=0)


@pytest.mark.parametrize("limit", [3, 0.5])
def test_the_totals_of_a_limited_epoch_are_those_of_its_batches(limit: float) -> None:
    examples = make_examples(29, seed=3)
    few = loader(examples, micro_batch_size=4, shuffle=False, normalize_over_epoch=True, limit_batches=limit)
    everything = collate_tokens([examples[row] for row in few.schedule.order(0)[: 3 * 4 if limit == 3 else 4 * 4]])
    losses = [
        aggregate(batch.input_ids[:, 1:].double(), batch.loss_mask, "token-mean", batch.token_denominator)
        for batch in itertools.islice(few, 3 if limit == 3 else 4)
    ]
    exact = aggregate(everything.input_ids[:, 1:].double(), everything.loss_mask)
    torch.testing.assert_close(torch.stack(losses).mean(), exact, rtol=1e-12, atol=0)


def test_epochs_are_shuffled_by_seed_and_epoch_alone() -> None:
    examples = make_examples(30)
    one = loader(examples, micro_batch_size=4, seed=5)
    assert one.schedule.order(0) == loader(examples, micro_batch_size=2, accumulate=2, seed=5).schedule.order(0)
    assert sorted(one.schedule.order(1)) == list(range(30))
    assert len({tuple(one.schedule.order(epoch)) for epoch in range(5)}) == 5
    assert one.schedule.order(0) != loader(examples, micro_batch_size=4, seed=6).schedule.order(0)
    assert loader(examples, micro_batch_size=4, shuffle=False).schedule.order(3) == list(range(30))


def test_epoch_comes_from_the_callable_or_from_set_epoch() -> None:
    examples = make_examples(30)
    told = loader(examples, micro_batch_size=4)
    told.set_epoch(2)
    asked = loader(examples, micro_batch_size=4, epoch=lambda: 2)
    for one, other in zip(told, asked, strict=True):
        assert torch.equal(one.input_ids, other.input_ids)


def test_drop_last_leaves_out_the_step_that_is_not_full() -> None:
    examples = make_examples(29)
    batches = list(loader(examples, micro_batch_size=2, accumulate=4, drop_last=True))
    assert len(batches) == 12
    assert sum(len(batch) for batch in batches) == 24
    with pytest.raises(ValueError, match="7 examples, and a step takes 8 and drop_last"):
        loader(make_examples(7), micro_batch_size=2, accumulate=4, drop_last=True)


@pytest.mark.parametrize("stop", range(16))
def test_resumed_loader_continues_where_it_stopped(stop: int) -> None:
    examples = make_examples(29)
    options = {"micro_batch_size": 2, "accumulate": 4, "epoch": lambda: 1}
    straight = list(loader(examples, **options))
    assert len(straight) == 15
    stopped = loader(examples, **options)
    before = list(itertools.islice(iter(stopped), stop))
    resumed = loader(examples, **options)
    resumed.load_state_dict(stopped.state_dict())
    after = list(resumed)
    if stop < 15:
        assert [batch.input_ids.tolist() for batch in before + after] == [b.input_ids.tolist() for b in straight]
    assert len(list(resumed)) == 15  # the epoch after that is whole


@pytest.mark.parametrize(("limit", "taken"), [(5, 5), (0.5, 7), (1.0, 15)])
def test_an_epoch_that_the_trainer_ends_early_is_resumed_as_ended(limit: float, taken: int) -> None:
    examples = make_examples(29)
    stopped = loader(examples, micro_batch_size=2, accumulate=4, limit_batches=limit)
    list(itertools.islice(stopped, taken - 1))
    assert stopped.state_dict()["position"] == taken - 1
    list(itertools.islice(stopped, taken))
    assert stopped.state_dict()["position"] == 0


def test_resuming_with_other_sizes_inside_an_epoch_is_an_error_and_at_its_end_is_not() -> None:
    examples = make_examples(29)
    saved = loader(examples, micro_batch_size=2, accumulate=4)
    iterator = iter(saved)
    next(iterator)
    other = loader(examples, micro_batch_size=2, accumulate=2)
    with pytest.raises(ValueError, match="accumulate was 4 and is 2"):
        other.load_state_dict(saved.state_dict())
    list(iterator)
    other.load_state_dict(saved.state_dict())
    assert len(list(other)) == len(other)


def test_a_step_among_other_ranks_is_refused_inside_an_epoch() -> None:
    examples, options = make_examples(29), {"micro_batch_size": 2, "world_size": 4}
    saved, other = loader(examples, **options), loader(examples, ranks_per_forward=2, **options)
    next(iter(saved))
    with pytest.raises(ValueError, match="ranks_per_forward was 1 and is 2"):
        other.load_state_dict(saved.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "micro_batch_size or as max_tokens_per_micro_batch"),
        ({"micro_batch_size": 1, "max_tokens_per_micro_batch": 9}, "got micro_batch_size=1 and"),
        ({"max_tokens_per_micro_batch": 3}, "does not fit into 3"),
        ({"micro_batch_size": 1, "rank": 2, "world_size": 2}, "at least 0 and at most 1, got 2"),
        ({"micro_batch_size": 1, "world_size": 4, "ranks_per_forward": 3}, "must divide world_size 4, got 3"),
    ],
)
def test_sizes_out_of_range_are_rejected(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loader(make_examples(4), **options)
    with pytest.raises(ValueError, match="0 examples"):
        loader([], micro_batch_size=1)
