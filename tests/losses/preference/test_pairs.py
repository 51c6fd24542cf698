"""Pairs among the samples of a prompt, against a search written by hand."""

import random

import torch

from rlhfkit.losses.preference.dpo import best_and_worst, pair_partners, rejected_values


def test_best_and_worst_are_those_of_a_search_over_each_group() -> None:
    generator = random.Random(0)
    for _ in range(50):
        group = [generator.randrange(4) for _ in range(12)]
        rewards = [generator.choice([0.0, 1.0, 2.0, float("nan")]) for _ in range(12)]
        signs = best_and_worst(torch.tensor(rewards), torch.tensor(group)).tolist()
        for number in set(group):
            known = {row: rewards[row] for row in range(12) if group[row] == number and rewards[row] == rewards[row]}
            chosen = [row for row in range(12) if group[row] == number and signs[row] == 1]
            rejected = [row for row in range(12) if group[row] == number and signs[row] == -1]
            if len(set(known.values())) < 2:
                assert not chosen
                assert not rejected
            else:
                assert [known[row] for row in chosen] == [max(known.values())]
                assert [known[row] for row in rejected] == [min(known.values())]


def test_partners_have_the_values_of_the_rejected_answers() -> None:
    signs = torch.tensor([0.0, 1, -1, -1, 0, 1, 1])
    group = torch.tensor([3, 3, 3, 8, 8, 8, 9])
    partners, pairs = pair_partners(signs, group)
    assert pairs.tolist() == [False, True, False, False, False, True, False]  # group 9 has no rejected answer
    values = torch.tensor([1.0, 2, 3, 4, 5, 6, 7])
    assert rejected_values(partners, values).tolist() == [0, 3, 0, 0, 0, 4, 0]
