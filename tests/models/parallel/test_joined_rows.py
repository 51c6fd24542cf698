"""Forward passes of several ranks equal those of each rank alone; so does a head that they divide by vocabulary.

Covers joined_rows.py, ulysses.py, vocabulary.py and router_loss.py.
"""

from typing import Any

import pytest
import torch
from strategies import ranks
from torch import Tensor
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen3_moe import modeling_qwen3_moe

from models.parallel.sequence_ranks import CASES
from rlhfkit.mesh import ForwardGroup, Mesh
from rlhfkit.models.forward import JoinedForward, UnpaddedBatch
from rlhfkit.models.parallel.joined_rows import OwnRow
from rlhfkit.models.parallel.vocabulary import vocabulary_parts
from rlhfkit.models.router_loss import _has_usual_formula


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    return ranks.run("models.parallel.sequence_ranks:everything", ranks=2, folder=tmp_path_factory.mktemp("two"))


@pytest.mark.smoke
@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_each_alone(case: str, two: list[dict[str, float]]) -> None:
    # Transformers sums the routers' probabilities in float32.
    tolerance = 2e-6 if case.startswith("router") else 1e-12
    for found in two:
        assert found[case] < tolerance


def test_a_family_whose_router_loss_has_another_formula_is_noticed() -> None:
    def squared(logits: tuple[Tensor, ...], experts: int, chosen: int, mask: Any) -> Tensor:
        return modeling_mixtral.load_balancing_loss_func(logits, experts, chosen, mask).square()

    for module in (modeling_mixtral, modeling_qwen3_moe, modeling_gpt_oss):
        assert _has_usual_formula(module.load_balancing_loss_func)
    assert not _has_usual_formula(squared)


@pytest.mark.distributed
def test_log_probs_entropy_and_all_gradients_of_a_divided_head_are_those_of_one_rank(tmp_path: Any) -> None:
    for report in ranks.run("models.parallel.vocabulary_ranks:compare", ranks=3, folder=tmp_path):
        assert len(report) == 24
        assert max(report.values()) < 1e-12, report


@pytest.mark.parametrize(("vocabulary", "sizes"), [(12, [4, 4, 4]), (13, [5, 4, 4]), (2, [1, 1, 0])])
def test_parts_cover_the_vocabulary_and_differ_by_one_entry_at_most(vocabulary: int, sizes: list[int]) -> None:
    parts = vocabulary_parts(vocabulary, 3)
    assert [part.stop - part.start for part in parts] == sizes
    assert [index for part in parts for index in range(part.start, part.stop)] == list(range(vocabulary))


def test_images_of_one_member_are_an_error_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others would wait for its tokens."""
    brought: list[OwnRow] = []
    monkeypatch.setattr(ForwardGroup, "gather", lambda _, own: brought.append(own) or brought)
    forward = JoinedForward(ForwardGroup(Mesh(0, 2, sequence=2), None, None, None), "model")
    for images in (((), ("a picture",)), None):
        with pytest.raises(ValueError, match=r"1 sequences of a batch have images, .* or its attention .*sequence_par"):
            forward.inputs(UnpaddedBatch(torch.ones(2, 3, dtype=torch.int64), images))
    assert len(brought) == 2
