"""Forward passes of several ranks equal those of each rank alone; so does a head that they divide by vocabulary.

Covers joined_rows.py, ulysses.py, vocabulary.py and router_loss.py.
"""

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from strategies import ranks
from torch import Tensor
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen3_moe import modeling_qwen3_moe

from rlhfkit.losses import linear_logprobs
from rlhfkit.mesh import ForwardGroup, Mesh
from rlhfkit.models.forward import JoinedForward, UnpaddedBatch
from rlhfkit.models.parallel.joined_rows import OwnRow
from rlhfkit.models.parallel.vocabulary import GroupVocabulary, vocabulary_parts
from rlhfkit.models.router_loss import _has_usual_formula


@pytest.mark.smoke
@pytest.mark.distributed
def test_two_ranks_equal_each_alone(tmp_path: Path) -> None:
    ranks.run("models.parallel.sequence_ranks:everything", ranks=2, folder=tmp_path)


def test_a_family_whose_router_loss_has_another_formula_is_noticed() -> None:
    def squared(logits: tuple[Tensor, ...], experts: int, chosen: int, mask: Any) -> Tensor:
        return modeling_mixtral.load_balancing_loss_func(logits, experts, chosen, mask).square()

    for module in (modeling_mixtral, modeling_qwen3_moe, modeling_gpt_oss):
        assert _has_usual_formula(module.load_balancing_loss_func)
    assert not _has_usual_formula(squared)


@pytest.mark.distributed
def test_log_probs_entropy_and_all_gradients_of_a_divided_head_are_those_of_one_rank(tmp_path: Path) -> None:
    ranks.run("models.parallel.test_joined_rows:divided_head", ranks=3, folder=tmp_path)


HEADS: dict[str, dict[str, Any]] = {
    "log-probs": {},
    "entropy": {"entropy": True},
    "small tiles": {"entropy": True, "chunk": 3},
    "all": {"entropy": True, "temperature": 0.7, "bias": True, "logit_scale": 0.5, "logit_softcap": 3.0},
}


def outputs(vocabulary: int, tokens: int, bias: bool = False, **options: Any) -> list[torch.Tensor]:
    """Results and gradients of the head, in float64."""
    generator = torch.Generator().manual_seed(vocabulary)
    hidden, weight, shift, outer = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((tokens, 5), (vocabulary, 5), (vocabulary,), (2, tokens))
    )
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    inputs = [one.requires_grad_() for one in ([hidden, weight, shift] if bias else [hidden, weight])]
    logprobs, entropy = linear_logprobs(hidden, weight, targets, bias=shift if bias else None, **options)
    found = [one for one in (logprobs, entropy) if one is not None]
    loss = sum(((one * factor).sum() for one, factor in zip(found, outer, strict=False)), torch.zeros(()))
    return [*(one.detach() for one in found), *torch.autograd.grad(loss, inputs)]


def divided_head(**_: Any) -> None:
    """For vocabularies that the ranks divide evenly, unevenly, and not at all."""
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    division = GroupVocabulary(dist.group.WORLD)
    for (name, options), vocabulary, tokens in itertools.product(HEADS.items(), (12, 13, 2), (9, 0)):
        want = outputs(vocabulary, tokens, **options)
        got = outputs(vocabulary, tokens, division=division, **options)
        place = f"{name}, {vocabulary} entries, {tokens} tokens: {{}}".format
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12, msg=place)


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
