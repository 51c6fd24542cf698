"""Properties of supervised optimizer steps: the same on any number of ranks, exactly normalised, resumable."""

import itertools
import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from data.examples import Table
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


def step_gradients(mode: str, accumulate: int, world: int, together: int, **size: int) -> list[torch.Tensor]:
    """Gradients of all steps of an epoch, with the divisions that Lightning and data-parallel averaging do."""
    examples = make_examples(29, seed=2)
    options = {"accumulate": accumulate, "world_size": world, "ranks_per_forward": together, **size}
    shares = [list(loader(examples, rank=rank, **options)) for rank in range(world)]
    for members in of_each(shares, together):  # of which those without rows bring two tokens
        for parts in zip(*members, strict=True):
            tokens = sum(int(part.attention_mask.sum()) for part in parts) - 2 * (together - 1)
            assert tokens <= size.get("max_tokens_per_micro_batch", tokens)
    gradients = []
    for step in windows(shares, accumulate):
        model = Model()
        for batch in step:
            denominator = batch.token_denominator if mode == "token-mean" else batch.sequence_denominator
            loss = aggregate(model(batch), batch.loss_mask, mode, denominator)
            (loss / accumulate / world).backward()
        gradients.append(model.table.grad)
    return gradients


# Accumulated micro-batches, ranks, ranks that compute a forward pass together, and the size of micro-batches.
ROWS = [(1, 1, 1, 8), (8, 1, 1, 1), (4, 1, 1, 2), (1, 2, 1, 4), (2, 2, 1, 2), (2, 4, 1, 1)]
ROWS += [(1, 2, 2, 8), (2, 4, 2, 2), (4, 4, 2, 1), (8, 4, 4, 1)]
BUDGETS = [(4, 1, 1), (2, 2, 1), (1, 4, 1), (4, 2, 2), (2, 4, 2), (1, 12, 3)]


@pytest.mark.parametrize("mode", ["token-mean", "sequence-mean-token-mean"])
@pytest.mark.parametrize(
    ("size", "splits"),
    [
        ("micro_batch_size", ROWS),
        ("max_tokens_per_micro_batch", [(*split, 12) for split in BUDGETS]),
        ("max_tokens_per_micro_batch", [(*split, 16) for split in BUDGETS]),
    ],
)
def test_gradient_of_a_step_does_not_depend_on_how_it_is_split(
    size: str, splits: list[tuple[int, int, int, int]], mode: str
) -> None:
    """29 examples in steps of 8: the last step has 5, whose micro-batches are fewer and some ranks' empty."""
    expected, *others = [step_gradients(mode, *split, **{size: number}) for *split, number in splits]
    assert len(expected) > 2
    for gradients in others:
        torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("size", "world", "limit", "used"),
    [
        *[({"micro_batch_size": rows}, world, 1.0, None) for rows, world in ((3, 1), (2, 3), (7, 4))],
        ({"max_tokens_per_micro_batch": 30}, 2, 1.0, None),
        *[({"micro_batch_size": 4}, 1, limit, used) for limit, used in ((3, 3), (0.5, 4))],
    ],
)
def test_totals_of_an_epoch_make_the_plain_mean_of_losses_exact(
    size: dict[str, int], world: int, limit: float, used: int | None
) -> None:
    examples, options = make_examples(29, seed=3), {"shuffle": False, "normalize_over_epoch": True}
    model = Model()
    everything = collate_tokens(examples[: used and 4 * used])
    losses = [
        aggregate(model(batch), batch.loss_mask, "token-mean", batch.token_denominator)
        for rank in range(world)
        for batch in itertools.islice(
            loader(examples, **size, rank=rank, world_size=world, limit_batches=limit, **options), used
        )
    ]
    exact = aggregate(model(everything), everything.loss_mask)
    torch.testing.assert_close(torch.stack(losses).mean(), exact, rtol=1e-12, atol=0)


def contents(batches: Iterable[TokenBatch]) -> list[list[list[int]]]:
    return [batch.input_ids.tolist() for batch in batches]


def test_epochs_are_shuffled_by_seed_and_epoch_alone() -> None:
    examples = make_examples(30)
    for size in ({"micro_batch_size": 4}, {"max_tokens_per_micro_batch": 20}):
        one = loader(examples, **size, seed=5).schedule
        assert sorted(one.order(1)) == list(range(one.units))
        assert len({tuple(one.order(epoch)) for epoch in range(5)}) == 5
        assert one.order(0) != loader(examples, **size, seed=6).schedule.order(0)
    orders = [loader(examples, micro_batch_size=size, accumulate=8 // size).schedule.order(0) for size in (2, 4)]
    assert orders[0] == orders[1]
    assert loader(examples, micro_batch_size=4, shuffle=False).schedule.order(3) == list(range(30))
    told, asked, first = (loader(examples, micro_batch_size=4, epoch=epoch) for epoch in (None, lambda: 2, None))
    told.set_epoch(2)
    assert contents(told) == contents(asked) != contents(first)


def test_drop_last_leaves_out_the_step_that_is_not_full() -> None:
    examples = make_examples(29)
    batches = list(loader(examples, micro_batch_size=2, accumulate=4, drop_last=True))
    assert len(batches) == 12
    assert sum(len(batch) for batch in batches) == 24
    with pytest.raises(ValueError, match="7 examples, and a step takes 8 and drop_last"):
        loader(make_examples(7), micro_batch_size=2, accumulate=4, drop_last=True)


@pytest.mark.parametrize("size", [{"micro_batch_size": 2}, {"max_tokens_per_micro_batch": 14}])
def test_resumed_loader_continues_where_it_stopped(size: dict[str, int]) -> None:
    examples, options = make_examples(29), {"accumulate": 4, "epoch": lambda: 1, **size}
    straight = contents(loader(examples, **options))
    assert len(straight) > 12
    for stop in range(len(straight) + 1):
        stopped, resumed = loader(examples, **options), loader(examples, **options)
        before = contents(itertools.islice(stopped, stop))
        resumed.load_state_dict(stopped.state_dict())
        rest = straight[stop:] or straight  # the epoch after that is whole
        assert before + contents(resumed) == straight[:stop] + rest
        assert contents(resumed) == straight


def test_resuming_with_other_sizes_inside_an_epoch_is_an_error_and_at_its_end_is_not() -> None:
    examples, sizes = make_examples(29), {"micro_batch_size": 2, "accumulate": 4, "world_size": 4}
    saved = loader(examples, **sizes)
    iterator = iter(saved)
    next(iterator)
    for name, before in (("accumulate", 4), ("ranks_per_forward", 1)):
        other = loader(examples, **sizes | {name: 2})
        with pytest.raises(ValueError, match=f"{name} was {before} and is 2"):
            other.load_state_dict(saved.state_dict())
    list(iterator)
    other.load_state_dict(saved.state_dict())
    assert len(list(other)) == len(other)


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
