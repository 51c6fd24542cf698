"""Micro-batches that keep the samples of a prompt together."""

from hypothesis import given
from hypothesis import strategies as st

from rlhfkit.data.grouping import deal_groups, tokens_computed
from rlhfkit.data.packing import deal

Groups = list[tuple[int, list[int]]]
"""Prompt length, and completion lengths, of each group."""


def flat(drawn: Groups) -> tuple[list[int], list[int], list[int]]:
    """Lengths, prompt lengths and group ids."""
    rows = [(prompt + each, prompt, 7 * number) for number, (prompt, made) in enumerate(drawn) for each in made]
    return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]


def slowest(bins: list[list[int]], ranks: int, *lists: list[int]) -> int:
    totals = [tokens_computed(rows, *lists) for rows in bins]
    return sum(max(totals[first : first + ranks]) for first in range(0, len(totals), ranks))


@given(
    st.lists(
        st.tuples(st.integers(1, 50), st.lists(st.integers(1, 60), min_size=1, max_size=8)), min_size=1, max_size=12
    ),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_every_row_once_and_never_slower_than_dealing_rows_one_by_one(drawn: Groups, ranks: int, steps: int) -> None:
    lengths, prompts, groups = flat(drawn)
    bins = ranks * steps
    if len(lengths) < bins:
        return
    dealt = deal_groups(range(len(lengths)), bins, lengths=lengths, prompts=prompts, groups=groups, ranks=ranks)
    assert len(dealt) == bins
    assert all(rows and rows == sorted(rows) for rows in dealt)
    assert sorted(row for rows in dealt for row in rows) == list(range(len(lengths)))
    one_by_one = [sorted(rows) for rows in deal(lengths, bins)]
    assert slowest(dealt, ranks, lengths, prompts, groups) <= slowest(one_by_one, ranks, lengths, prompts, groups)


def test_whole_groups_stay_together_where_one_rank_computes_them() -> None:
    lengths, prompts, groups = flat([(100, [10, 20, 30, 40]) for _ in range(6)])
    dealt = deal_groups(range(24), 3, lengths=lengths, prompts=prompts, groups=groups, ranks=1)
    assert sorted(len({groups[row] for row in rows}) for rows in dealt) == [2, 2, 2]
    computed = sum(tokens_computed(rows, lengths, prompts, groups) for rows in dealt)
    assert computed == 6 * (100 + 100)


def test_groups_are_split_where_a_rank_would_wait_for_another() -> None:
    """One prompt of eight long answers beside a short one: two ranks share the work on the long ones."""
    lengths, prompts, groups = flat([(5, [100] * 8), (5, [1])])
    dealt = deal_groups(range(9), 2, lengths=lengths, prompts=prompts, groups=groups, ranks=2)
    assert slowest(dealt, 2, lengths, prompts, groups) <= 5 + 400 + 6


def test_rows_may_be_any_part_of_the_iteration() -> None:
    lengths, prompts, groups = flat([(4, [3, 3]), (4, [3, 3]), (4, [3, 3])])
    assert deal_groups([2, 3, 4, 5], 2, lengths=lengths, prompts=prompts, groups=groups, ranks=1) == [[2, 3], [4, 5]]
